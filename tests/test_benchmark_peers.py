"""The parts of `benchmarks/decode.py` that need neither peers nor a network: files, bounds, turns, failing workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from peers.bounds import Rates, Shape
from peers.cases import Case, chosen, interleave
from peers.driving import Worker, WorkerError
from peers.environments import UnavailableError, python_of
from peers.folder_writer import write_folder
from peers.gguf_writer import write_f16_gguf
from peers.pins import Entrant
from peers.results import bars, same_start, summarise
from peers.serving import Generated, answer, decode_window, prompts_of

from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.safetensors import SafetensorsCheckpoint

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 40
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip
NORMS = 61 * 576  # elements that `Shape` leaves out
PARAMETERS = 134_515_008  # as the model's page on the hub counts them


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A llama of one layer with a vocabulary of single characters, in F32; its tensors as they are in the file."""
    generator = np.random.default_rng(3)
    shapes = {
        "token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {f"{name}.weight": generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "AB", *(chr(ord("A") + i) for i in range(VOCAB - 2))])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    tiny_gguf(tmp_path / "m.gguf")
    opened = GGUFCheckpoint(tmp_path / "m.gguf")
    yield opened
    opened.close()


def test_the_f16_file_holds_the_source_file_rounded(checkpoint: GGUFCheckpoint, tmp_path: Path) -> None:
    write_f16_gguf(checkpoint, tmp_path / "f16.gguf")
    source, written = gguf.GGUFReader(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "f16.gguf")
    assert [one.name for one in written.tensors] == [one.name for one in source.tensors]
    for before, after in zip(source.tensors, written.tensors, strict=True):
        kind = np.float16 if before.data.ndim > 1 else np.float32
        assert after.data.dtype == kind
        assert np.array_equal(after.data, before.data.astype(kind)), before.name
    for key in set(source.fields) - {"general.file_type", "GGUF.kv_count", "GGUF.tensor_count"}:
        assert written.fields[key].contents() == source.fields[key].contents(), key
    assert written.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16


def test_our_loader_reads_the_same_weights_from_each_form(checkpoint: GGUFCheckpoint, tmp_path: Path) -> None:
    write_f16_gguf(checkpoint, tmp_path / "f16.gguf")
    write_folder(checkpoint, tmp_path / "folder")
    f16, folder = GGUFCheckpoint(tmp_path / "f16.gguf"), SafetensorsCheckpoint(tmp_path / "folder")
    assert f16.names() == folder.names() == checkpoint.names()
    assert f16.config == checkpoint.config
    for name in checkpoint.names():
        whole = checkpoint.tensor(name, torch.float32)
        rounded = whole.half().float() if whole.dim() > 1 else whole
        assert torch.equal(f16.tensor(name, torch.float32), rounded), name
        assert torch.equal(folder.tensor(name, torch.bfloat16), whole.bfloat16()), name
    f16.close()
    folder.close()


def test_a_shape_counts_the_parameters_of_the_model() -> None:
    shape = Shape.of(SMOLLM2)
    assert shape.layers + shape.head + NORMS == PARAMETERS
    assert shape.kv_bytes_a_token == 2 * 30 * 3 * 64 * 2


def test_bounds_by_hand() -> None:
    shape = Shape(layers=900, head=100, kv_bytes_a_token=10, attention_flops_a_pair=4)
    reads = Rates(bytes_per_s=1000.0, flops_per_s=1e12)  # 2,000 bytes of weights: 2 s, and 0.01 s a KV entry
    assert shape.decode_bound(reads, batch=1, context=0, new_tokens=0) == 0.5
    assert shape.decode_bound(reads, batch=1, context=90, new_tokens=20) == pytest.approx(1 / 3)
    assert shape.decode_bound(reads, batch=4, context=90, new_tokens=20) == pytest.approx(4 / 6)
    multiplies = Rates(bytes_per_s=1e12, flops_per_s=1000.0)
    assert shape.decode_bound(multiplies, batch=8, context=0, new_tokens=0) == 0.5
    assert shape.decode_bound(multiplies, batch=8, context=250, new_tokens=0) == pytest.approx(1 / 3)
    assert shape.prefill_bound(multiplies, tokens=1) == pytest.approx(1000 / 2004)
    assert shape.prefill_bound(multiplies, tokens=3) == pytest.approx(3 / (5.4 + 0.2 + 0.024))  # 6 pairs


class Recorder:
    """A contender that notes when it is asked; fails at the calls whose numbers are in `fails`."""

    def __init__(self, name: str, log: list[tuple[str, int]], fails: int | None = None) -> None:
        self.name, self.log, self.fails, self.num_calls = name, log, fails, 0

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        if self.num_calls == self.fails:
            raise WorkerError("boom")
        self.log.append((self.name, request["seed"]))
        return {"seconds": 2.0, "tokens": 10 * request["seed"]}


def test_contenders_take_turns_and_warm_up_first() -> None:
    log: list[tuple[str, int]] = []
    lines: list[str] = []
    batches = {"a": (1,), "b": (1, 8), "c": (1,)}
    contenders = {name: Recorder(name, log) for name in batches}
    request = {"run": "decode", "context": 5, "new_tokens": 4}
    cases = [Case("one", {**request, "batch": 1}), Case("eight", {**request, "batch": 8}, heavy=True)]
    samples = interleave(cases, contenders, batches, 2, lines.append)
    assert log[:9] == [(name, seed) for seed in (0, 1, 2) for name in "abc"]
    assert log[9:] == [("b", 0), ("b", 1)]  # those that can; half of the rounds
    assert samples.tokens_per_s == {
        "one": {"a": [5.0, 10.0], "b": [5.0, 10.0], "c": [5.0, 10.0]},
        "eight": {"b": [5.0]},
    }
    assert len(lines) == 3
    assert not samples.failed


def test_a_contender_that_fails_is_reported_and_the_rest_go_on() -> None:
    log: list[tuple[str, int]] = []
    contenders = {"a": Recorder("a", log, fails=3), "b": Recorder("b", log)}
    cases = [Case(name, {"run": "decode", "batch": 1, "context": 5, "new_tokens": 4}) for name in ("one", "two")]
    samples = interleave(cases, contenders, {"a": (1,), "b": (1,)}, 2, lambda line: None)
    assert samples.failed == {"a": "one: boom"}
    assert samples.tokens_per_s == {"one": {"a": [5.0], "b": [5.0, 10.0]}, "two": {"b": [5.0, 10.0]}}
    assert contenders["a"].num_calls == 3


class Counting:
    """Generates one token of each sequence a second, the first sequence a second before the others."""

    vocab_size = 100

    def generate(self, prompts: Any, new_tokens: int) -> Generated:
        if new_tokens == 7:
            raise RuntimeError("seven\nis too many")
        times = [[10.0 + (i > 0) + j for j in range(new_tokens)] for i in range(len(prompts))]
        return Generated(8.0, times, [list(prompt[:new_tokens]) for prompt in prompts])


def test_replies_count_only_what_all_sequences_decode() -> None:
    decode = {"run": "decode", "batch": 3, "context": 20, "new_tokens": 5, "seed": 1}
    assert answer(Counting(), decode) == {"seconds": 3.0, "tokens": 9}  # from 11 to 14, 3 sequences
    assert answer(Counting(), {"run": "prefill", "tokens": 20, "seed": 1}) == {"seconds": 2.0, "tokens": 20}
    assert answer(Counting(), {"run": "greedy", "prompt": [5, 6, 7], "new_tokens": 2}) == {"token_ids": [5, 6]}
    with pytest.raises(ValueError, match="ask for more new_tokens"):
        decode_window([[1.0, 2.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match="unknown run 'train'"):
        answer(Counting(), {"run": "train"})


def test_prompts_differ_by_seed_and_sequence_and_not_by_call() -> None:
    first = prompts_of(1, 2, 30, 100)
    assert first == prompts_of(1, 2, 30, 100)
    assert first[0] != first[1]
    assert first != prompts_of(2, 2, 30, 100)
    assert {len(one) for one in first} == {30}
    assert 16 <= min(map(min, first)) <= max(map(max, first)) < 100


WORKER = """
import sys, os
from peers.serving import serve, Generated

class Contender:
    vocab_size = 100
    def generate(self, prompts, new_tokens):
        if new_tokens == 3:
            raise RuntimeError("three\\nis bad")
        if new_tokens == 4:
            print("last words", file=sys.stderr, flush=True)
            os._exit(5)
        print("noise on standard output", flush=True)
        return Generated(0.0, [[1.0] * new_tokens], [list(range(new_tokens))])

def make(setup):
    if setup.threads == 9:
        raise RuntimeError("no such threads")
    return Contender()

serve(make)
"""


def start(folder: Path, threads: int) -> Worker:
    setup = f'{{"path": "x", "threads": {threads}}}'
    variables = {"PYTHONPATH": str(Path(__file__).parents[1] / "benchmarks")}
    return Worker([sys.executable, "-c", WORKER, setup], variables, folder / "worker.log")


def test_a_worker_answers_survives_errors_and_its_end_is_told(tmp_path: Path) -> None:
    with start(tmp_path, 1) as worker:
        assert worker.ask({"run": "greedy", "prompt": [1], "new_tokens": 2}) == {"token_ids": [0, 1]}
        with pytest.raises(WorkerError, match=r"^RuntimeError: three is bad$"):
            worker.ask({"run": "greedy", "prompt": [1], "new_tokens": 3})
        assert worker.ask({"run": "greedy", "prompt": [1], "new_tokens": 1}) == {"token_ids": [0]}
        with pytest.raises(WorkerError, match=r"^it ended \(exit code 5: last words\)$"):
            worker.ask({"run": "greedy", "prompt": [1], "new_tokens": 4})
    with pytest.raises(WorkerError, match=r"^RuntimeError: no such threads$"):
        start(tmp_path, 9)


def test_a_peer_that_cannot_be_installed_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "environments").write_text("in the way of the folder")
    entrant = Entrant(worker="x", reads="gguf", batches=(1,), installs=(("nothing",),))
    with pytest.raises(UnavailableError, match=r"^-m venv \S+ \.\.\.: .*(exists|[Dd]irectory)"):
        python_of("x", entrant, tmp_path)
    assert python_of("y", Entrant(worker="x", reads="gguf", batches=(1,)), tmp_path) == Path(sys.executable)


def test_results_compare_with_the_best_peer_and_the_bound() -> None:
    cases = chosen(["prefill"])
    speeds = {"prefill_1024": {"pluglm": [30.0, 90.0, 60.0], "slow": [10.0], "fast": [40.0, 20.0]}}
    shape, rates = Shape(512, 0, 0, 0), Rates(1e12, 102400.0)  # 1,024 operations a token: 100 tokens/s
    log: list[tuple[str, int]] = []
    samples = interleave([], {"a": Recorder("a", log)}, {"a": (1,)}, 1, lambda line: None)
    samples.tokens_per_s = speeds
    one = summarise(cases, samples, shape, {"prefill_1024": rates})["prefill_1024"]
    assert one["median"] == {"pluglm": 60.0, "slow": 10.0, "fast": 30.0}
    assert (one["best_peer"], one["ratio"], one["share_of_bound"]) == ("fast", 2.0, pytest.approx(0.6))
    assert bars({"prefill_1024": one}) == [
        {"name": "prefill_1024: ours / best peer (fast)", "value": 2.0, "least": 1.0}
    ]
    samples.tokens_per_s = {"prefill_1024": {"fast": [40.0]}}
    alone = summarise(cases, samples, shape, {"prefill_1024": rates})["prefill_1024"]
    assert (alone["ratio"], alone["share_of_bound"], alone["best_peer"]) == (None, None, "fast")


def test_greedy_tokens_are_compared_up_to_the_first_that_differs() -> None:
    assert same_start([1, 2, 3], [1, 2, 4]) == 2
    assert same_start([1, 2, 3], [1, 2]) == 2
    assert same_start([1], [2]) == 0
