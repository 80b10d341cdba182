"""Whole models with Triton's row kernels in its interpreter: the engine's greedy tokens, and decode steps as graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_backend_graphs import STEPS, Bench, EagerBackend, NoScalars, RecordedBackend, count_waits
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from triton_families import FAMILIES, RowsBackend

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.backends.graph_buckets import CAPTURED, REPLAYED
from pluglm.backends.rows import whole_rows
from pluglm.kernel.core import Chunk
from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.kernel.runner import ModelRunner
from pluglm.models.llama import LlamaModel
from pluglm.testing.batches import grow
from pluglm.testing.graph_attention import TableAttention
from pluglm.testing.tiny_model import LoopAttention
from pluglm.testing.tokenizers import TinyTokenizer
from pluglm.triton_kernels import gated, gather, launching, rms_norm, rope
from pluglm.triton_kernels.fuser import TritonFuser

PROMPTS: list[dict[str, Any]] = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [11, 12]}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def write_model(folder: Path, name: str) -> Path:
    checkpoint = FAMILIES[name].checkpoint()
    tensors = {one: checkpoint.tensor(one, torch.float32) for one in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    (folder / "tokenizer.json").write_text(TinyTokenizer().to_json())
    return folder


def generate(folder: Path, kernels: str) -> tuple[list[list[int]], dict[str, str]]:
    """Greedy tokens of each prompt, and the kernel of each operation."""
    config = RunConfig.from_dict(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "backend": {"use": f"triton_families:{RowsBackend.__name__}", "kernels": kernels},
            "attention": "naive",
            "kv": {"use": "paged", "block_size": 4},
        }
    )
    with Engine.from_config(config) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)
        return [list(one.token_ids) for one in outputs], {one.operation: one.kernel for one in engine.kernels}


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_greedy_tokens_of_a_run_are_those_of_torch(tmp_path: Path, name: str) -> None:
    """qwen2 has biases; gemma3 norms of heads, norms on both sides, windows and a soft cap."""
    folder = write_model(tmp_path, name)
    tokens, kernels = generate(folder, "triton")
    assert (kernels["decoder layer"], kernels["head"]) == ("triton", "triton")
    expected, plain = generate(folder, "torch")
    assert "decoder layer" not in plain
    assert tokens == expected
    assert len({tuple(one) for one in tokens}) == len(PROMPTS)


class FusedBackend(RecordedBackend):
    def __init__(self) -> None:
        super().__init__()
        self._fuser, self._pick_rows = TritonFuser("cpu", self.kernels), gather.gather_rows


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches go into the graph that is being recorded, as a stream's do, and are counted when the host makes them.

    The interpreter stands for the device: what it does with tensors is not an operation of the host's.
    """
    made: list[str] = []

    def launch(kernel: Callable[[], Any], x: torch.Tensor) -> None:
        recorder = _get_current_dispatch_mode()
        made.append(kernel.__qualname__)

        def interpreted() -> None:
            with _disable_current_modes():
                launching.launch(kernel, x)

        interpreted._schema = SimpleNamespace(is_mutable=True)  # type: ignore[attr-defined]
        interpreted()
        if hasattr(recorder, "calls"):
            recorder.calls.append((interpreted, (), {}, []))

    for module in (gated, gather, rms_norm, rope):
        monkeypatch.setattr(module, "launch", launch)
    return made


PER_LAYER, LAYERS = 5, 2


def test_replayed_steps_with_fused_layers_equal_eager_ones_of_torch(launches: list[str]) -> None:
    graphs, eager = Bench(FusedBackend(), LlamaModel), Bench(EagerBackend(), LlamaModel, LoopAttention())
    made, reasons = [], []
    for parts in STEPS[:5]:  # each bucket is captured, and one is replayed
        launches.clear()
        torch.testing.assert_close(graphs.step(*parts), eager.step(*parts), rtol=0, atol=2e-5)
        made.append(len(launches))
        reasons.append(graphs.decision().reason)
    once = PER_LAYER * LAYERS + 1  # and the norm of the head
    assert reasons[1:] == [CAPTURED, CAPTURED, CAPTURED, REPLAYED]
    # An eager step gathers its rows, behind the last attention: those of the layer and of the attention. A capture, of
    # which every row has logits, runs the step once before.
    assert made == [once + 2, 2 * once, 2 * once, 2 * once, 0]
    assert KernelChoice("decoder layer", "triton") in graphs.backend.kernels.choices


def test_no_step_with_fused_layers_waits_but_for_the_copy_of_its_tokens(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a replayed step nor an eager one; in the interpreter only torch's operations of the host are counted."""
    bench = Bench(FusedBackend(), LlamaModel, TableAttention())
    runner = ModelRunner(bench.backend, bench.model, bench.attention, bench.pool, bench.store)
    bench.step((1, [3, 1, 4], 0), (2, [9, 2], 0))
    bench.step((1, [5], 3), (2, [3], 2))
    for sequence_id, num_tokens in ((1, 5), (2, 4)):
        grow(bench.pool, sequence_id, num_tokens)
    found = count_waits(monkeypatch)
    inputs = runner.make_input([Chunk(1, [7], 4), Chunk(2, [7], 3)])
    launches.clear()
    with NoScalars():
        tokens_R = runner.run(inputs).argmax(-1)
    assert (bench.decision().reason, found, launches) == (REPLAYED, [], [])
    x_TD, angles_T1H, layer = torch.ones(3, 16), torch.ones(3, 1, 4), bench.model._layers[0]
    with NoScalars():
        heads = layer.before_attention(whole_rows, x_TD, angles_T1H, angles_T1H)
        logits_RV = bench.model.logits(layer.after_attention(whole_rows, x_TD, heads[0]))
    assert (len(launches), found, logits_RV.shape) == (PER_LAYER + 1, [], (3, 40))
    tokens_R.tolist()  # the one copy of a step
    assert found == ["tolist"]
