"""Runs in a KV format: the same tokens and the same stored bits, whatever else happens to a request.

The tokens are those of transformers with a cache that gives back what the format stores, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import real_config, require_idle
from kv_file_cases import PROMPT, answer, cached, num_cached, require_miss
from kv_format_cases import FORMATS, reference_tokens
from kv_tier_cases import HOST, PROMPTS, disk, tiered
from step_cases import Steps, takes
from window_cases import GREEDY as WINDOWED
from window_cases import KINDS, prompts, write_model

from pluglm import Engine, SamplingParams
from pluglm.kv.files import KIND
from pluglm.kv.sealed import SealedFile

TEXTS = [[9, 41, 77, 12, 30, 5, 18], [23], list(range(60, 90))]
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

pytestmark = pytest.mark.parametrize("kv_format", FORMATS)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[[str, list[list[int]], int], list[list[int]]]:
    known: dict[Any, list[list[int]]] = {}

    def tokens(kv_format: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        key = (kv_format, str(prompts), num_tokens)
        if key not in known:
            known[key] = reference_tokens(tiny_model, prompts, num_tokens, kv_format)
        return known[key]

    return tokens


def run(config: Any) -> list[list[int]]:
    with Engine(config) as engine:
        outputs = engine.generate([{"prompt_token_ids": list(one)} for one in TEXTS], PARAMS)
        require_idle(engine)
    assert [output.error for output in outputs] == [None] * len(TEXTS)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("attention", ["flash", "naive", "paged"])
@pytest.mark.parametrize(("chunk", "block_size"), [(3, 4), (8, 1), (512, 16), (7, 64)])
def test_chunks_and_blocks(
    tiny_model: Path, reference: Any, kv_format: str, attention: str, chunk: int, block_size: int
) -> None:
    config = real_config(
        tiny_model,
        kv_format=kv_format,
        attention=attention,
        kv={"use": "paged", "block_size": block_size},
        engine={"max_step_tokens": chunk, "max_num_seqs": 2},
    )
    assert run(config) == reference(kv_format, TEXTS, NUM_TOKENS)


@pytest.mark.parametrize("kv", ["contiguous", "hash_prefix", "radix", "window_paged"])
def test_managers(tiny_model: Path, reference: Any, kv_format: str, kv: str) -> None:
    config = real_config(tiny_model, kv_format=kv_format, kv=kv, engine={"max_step_tokens": 8, "max_num_seqs": 2})
    assert run(config) == reference(kv_format, TEXTS, NUM_TOKENS)


@pytest.mark.parametrize("family", KINDS)
def test_layers_with_windows(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, kv_format: str, family: str
) -> None:
    """Pools of their own give the tokens of one pool, whose requests compute their prompts whole."""
    model = write_model(tmp_path_factory.mktemp(family), family, tiny_model)
    texts = []
    for kv, chunk in (("paged", 4096), ("window_paged", 64), ("window_paged", 7)):
        config = real_config(
            model,
            model={"path": str(model), "dtype": "float32", "max_model_len": 400},
            kv_format=kv_format,
            kv=kv,
            engine={"max_num_seqs": 4, "max_step_tokens": chunk},
        )
        with Engine(config) as engine:
            outputs = engine.generate(prompts(), WINDOWED)
            texts.append([(output.token_ids, output.error) for output in outputs])
            require_idle(engine)
    assert texts[0] == texts[1] == texts[2]
    assert all(len(tokens) == 30 and error is None for tokens, error in texts[0])


@pytest.mark.parametrize("mode", ["recompute", "offload", "pause"])
def test_preemption(tiny_model: Path, tmp_path: Path, reference: Any, kv_format: str, mode: str) -> None:
    """`a` has run for five steps when `b` takes its seat and, but for a pause, writes over what it had."""
    config = real_config(
        tiny_model,
        tmp_path,
        kv_format=kv_format,
        scheduler=takes(tmp_path, mode),
        kv={"use": "paged", "block_size": 4, "num_blocks": 16},
        engine={"max_num_seqs": 1},
    )
    with Engine(config) as engine:
        steps = Steps(engine)
        steps.add("a", TEXTS[0], PARAMS)
        steps.step(5)
        steps.add("b", TEXTS[2], PARAMS, priority=-1)
        steps.finish()
        expected = reference(kv_format, [TEXTS[0], TEXTS[2]], NUM_TOKENS)
        assert [steps.tokens("a"), steps.tokens("b")] == expected
        metrics = steps.metrics("a")
        assert metrics.num_preemptions == 1
        assert (metrics.num_recomputed_tokens > 0) == (mode == "recompute")
        require_idle(engine)


def test_offloaded_bytes_are_those_of_codes_and_scales(tiny_model: Path, tmp_path: Path, kv_format: str) -> None:
    """Eleven computed tokens are three blocks of 4: of each, 2 layers of a key and a value of 2 heads of 12 + 4."""
    pool = {"use": "paged", "block_size": 4, "num_blocks": 16}
    num_bytes = 3 * 4 * 2 * 2 * 2 * (12 + 4)
    for offload_memory, num_recomputed in ((num_bytes, 0), (num_bytes - 1, 11)):
        config = real_config(
            tiny_model,
            tmp_path,
            kv_format=kv_format,
            scheduler=takes(tmp_path, "offload"),
            kv=pool,
            engine={"max_num_seqs": 1, "offload_memory": offload_memory},
        )
        with Engine(config) as engine:
            steps = Steps(engine)
            steps.add("a", TEXTS[0], PARAMS)
            steps.step(5)
            assert steps.sequence("a").num_computed == 11
            steps.add("b", TEXTS[2], PARAMS, priority=-1)
            steps.finish()
            assert steps.metrics("a").num_recomputed_tokens == num_recomputed


@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
def test_cached_prefixes(tiny_model: Path, reference: Any, kv_format: str, use: str) -> None:
    """Again after itself, and after a text that parts inside a block, which is copied with its scales."""
    prompt = PROMPT["prompt_token_ids"]
    other = [*prompt[:14], 3, 3]
    expected = reference(kv_format, [prompt, other], 8)
    with Engine(cached(tiny_model, use, 4, real_config, kv_format=kv_format)) as engine:
        outputs = [answer(engine, {"prompt_token_ids": one}) for one in (prompt, prompt, other)]
        require_idle(engine)
    assert [output.token_ids for output in outputs] == [expected[0], expected[0], expected[1]]
    adopted = {"hash_prefix": [0, 20, 12], "radix": [0, 20, 14]}[use]
    assert [num_cached(output) for output in outputs] == adopted


@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
def test_saved_kv(tiny_model: Path, tmp_path: Path, reference: Any, kv_format: str, use: str) -> None:
    expected = reference(kv_format, [PROMPT["prompt_token_ids"]], 8)[0]
    path, config = tmp_path / "kv", cached(tiny_model, use, 4, real_config, kv_format=kv_format)
    with Engine(config) as engine:
        assert answer(engine).token_ids == expected
        engine.save_kv(PROMPT, path)
    tensors = SealedFile(KIND, path.read_bytes()).tensors()
    names = {f"{name}.{layer}" for name in ("keys", "values", "key_scales", "value_scales") for layer in (0, 1)}
    assert set(tensors) == names
    with Engine(config) as engine:
        assert engine.load_kv(path).num_tokens == len(tensors["keys.0"])
        output = answer(engine)
        assert output.token_ids == expected
        assert num_cached(output) == 20
    (another,) = {*FORMATS, None} - {kv_format, "int8" if kv_format == "fp8" else "fp8"}
    for other in (another, "int8" if kv_format == "fp8" else "fp8"):
        with Engine(cached(tiny_model, use, 4, real_config, kv_format=other)) as engine:
            require_miss(engine.load_kv(path), path, "was saved with another kv_format")


def test_stored_bits_do_not_depend_on_chunks_or_blocks(tiny_model: Path, tmp_path: Path, kv_format: str) -> None:
    """Of a prompt and its output, whose tokens were computed one by one."""
    found = []
    for number, (chunk, block_size) in enumerate([(512, 4), (3, 4), (5, 1)]):
        path = tmp_path / str(number)
        config = cached(
            tiny_model, "radix", block_size, real_config, kv_format=kv_format, engine={"max_step_tokens": chunk}
        )
        with Engine(config) as engine:
            text = [*PROMPT["prompt_token_ids"], *answer(engine).token_ids]
            engine.save_kv({"prompt_token_ids": text[:28]}, path)
        found.append(SealedFile(KIND, path.read_bytes()).tensors())
    assert len(found[0]["keys.0"]) == 28
    for name, tensor in found[0].items():
        assert all(torch.equal(tensor, other[name]) for other in found[1:]), name


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_tiers(tiny_model: Path, tmp_path: Path, reference: Any, kv_format: str, kind: str) -> None:
    """Three prompts push one another out of the pool and come back from the tier."""
    tier = {"host": HOST, "disk": disk(tmp_path)}[kind]
    expected = reference(kv_format, [one["prompt_token_ids"] for one in PROMPTS], 8)
    with Engine(tiered(tiny_model, tier, make=real_config, kv_format=kv_format)) as engine:
        outputs = [(one, answer(engine, PROMPTS[one])) for one in (0, 1, 2, 0, 1, 2)]
        require_idle(engine)
        (counts,) = engine.kv_tiers.values()
    assert all(output.token_ids == expected[one] for one, output in outputs)
    assert counts.num_loaded > 0
    assert counts.num_failed == 0


def test_several_outputs_share_blocks(tiny_model: Path, kv_format: str) -> None:
    """Lanes fork from the prompt, in blocks that are copied before they part. The first is what one output alone is."""
    texts = []
    for num_outputs, block_size in ((1, 4), (3, 4), (3, 1)):
        params = SamplingParams(temperature=1.0, seed=5, n=num_outputs, max_tokens=8, ignore_eos=True)
        kv = {"use": "paged", "block_size": block_size}
        with Engine(real_config(tiny_model, kv_format=kv_format, kv=kv)) as engine:
            (output,) = engine.generate({"prompt_token_ids": TEXTS[0]}, params)
            texts.append([lane.token_ids for lane in output.completions])
            require_idle(engine)
    assert texts[1][:1] == texts[0]
    assert texts[1] == texts[2]
    assert len({str(one) for one in texts[1]}) == 3
