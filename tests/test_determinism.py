"""Deterministic mode: one request's tokens and logits are the same bits alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm import Engine, RunConfig, SamplingParams

PROMPT = [9, 41, 77, 12, 30, 5, 18, 33, 21, 8, 99]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True)


def deterministic(model: Path, **engine: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "backend": "cpu",
            "attention": "naive",
            "engine": {"deterministic": True, "num_threads": 2, **engine},
        }
    )


class Recorder:
    """Keeps the logits rows of one prompt's request, by output position, as the sampler is given them."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        drawer, wanted = engine._core._drawer, tuple(prompt)
        original = drawer.draw

        def draw(logits_RV: torch.Tensor, windows: Any) -> Any:
            row = 0
            for window in windows:
                count = len(window.drafts) + 1
                if window.sequence.request.prompt_token_ids == wanted:
                    for index in range(count):
                        self.rows[window.sequence.num_output + index] = logits_RV[row + index].clone()
                row += count
            return original(logits_RV, windows)

        drawer.draw = draw  # type: ignore[method-assign]


def mates(count: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [{"prompt_token_ids": torch.randint(1, 250, (n,), generator=generator).tolist()} for n in lengths]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, params in (("greedy", PARAMS), ("sampled", SAMPLED)):
        with Engine.from_config(deterministic(tiny_model)) as engine:
            recorder = Recorder(engine, PROMPT)
            result[name] = engine.generate({"prompt_token_ids": PROMPT}, params)[0].token_ids, recorder.rows
    return result


@pytest.mark.parametrize("num_mates", [1, 3, 15])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_bits_do_not_depend_on_batch_mates(tiny_model: Path, alone: dict[str, Any], num_mates: int, kind: str) -> None:
    params = PARAMS if kind == "greedy" else SAMPLED
    with Engine.from_config(deterministic(tiny_model)) as engine:
        recorder = Recorder(engine, PROMPT)
        beside = mates(num_mates)
        middle = len(beside) // 2
        prompts = [*beside[:middle], {"prompt_token_ids": PROMPT}, *beside[middle:]]
        output = engine.generate(prompts, params)[middle]
    tokens, rows = alone[kind]
    assert output.token_ids == tokens
    assert recorder.rows.keys() == rows.keys()
    for position, row in rows.items():
        assert torch.equal(recorder.rows[position], row), f"logits of output position {position} differ in their bits"


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"max_step_tokens": 1}},
        {"engine": {"max_step_tokens": 7}},
        {"kv": {"use": "paged", "block_size": 1}},
        {"kv": {"use": "paged", "block_size": 64}},
        {"kv": {"use": "contiguous"}},
        {"drafter": {"use": "ngram", "num_tokens": 3}},
        {"scheduler": {"use": "priority"}},
        {"engine": {"num_threads": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_do_not_depend_on_chunks_blocks_or_drafts(
    tiny_model: Path, alone: dict[str, Any], change: dict[str, Any], kind: str
) -> None:
    config = deterministic(tiny_model, **change.get("engine", {})).model_dump()
    config.update({slot: value for slot, value in change.items() if slot != "engine"})
    with Engine.from_config(RunConfig.from_dict(config)) as engine:
        recorder = Recorder(engine, PROMPT)
        prompts = [{"prompt_token_ids": PROMPT}, *mates(3)]
        output = engine.generate(prompts, PARAMS if kind == "greedy" else SAMPLED)[0]
    tokens, rows = alone[kind]
    assert output.token_ids == tokens
    for position, row in rows.items():
        assert torch.equal(recorder.rows[position], row)


def test_preemption_does_not_change_the_bits(tiny_model: Path, alone: dict[str, Any]) -> None:
    """A pool of five 8-token blocks holds one request whole, so four of them keep evicting one another."""
    config = deterministic(tiny_model).model_dump()
    config["kv"] = {"use": "paged", "block_size": 8, "num_blocks": 5}
    with Engine.from_config(RunConfig.from_dict(config)) as engine:
        outputs = engine.generate([{"prompt_token_ids": PROMPT}] * 4, PARAMS)
        assert engine._core.kv.capacity().held_blocks == 0
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.token_ids for output in outputs] == [alone["greedy"][0]] * 4
