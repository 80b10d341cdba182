"""Chains whose truncations in a row run as one kernel, in triton's interpreter: the tokens of the steps one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampler_cases import chain, row

from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.device_cut import runs_of
from pluglm_samplers.presets import PRESETS

SIZE = 45
PARAMS = (
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.6},
    {"min_p": 0.2, "top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 0.0, "top_k": 4},
    {"temperature": 1.5},
)


@pytest.fixture(autouse=True)
def cut_on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if the rows were on a GPU; counts the calls."""
    from pluglm_samplers import chain as module

    calls: list[int] = []
    inner = module.cut

    def counted(active: Any, logits_RV: torch.Tensor, rows: Any) -> torch.Tensor:
        calls.append(len(active))
        return inner(active, logits_RV, rows)

    monkeypatch.setattr(module, "can_cut", lambda logits_RV: True)
    monkeypatch.setattr(module, "on_host", lambda logits_RV: False)
    monkeypatch.setattr(module, "cut", counted)
    return calls


@pytest.mark.parametrize(("preset", "num_cuts"), [("default", 1), ("vllm", 2), ("llama.cpp", 2), ("joint", 1)])
def test_tokens_are_those_of_the_steps(preset: Any, num_cuts: int, cut_on_the_host: list[int]) -> None:
    logits_RV = torch.randn(len(PARAMS), SIZE, generator=torch.Generator().manual_seed(2)) * 3
    rows = [row(SamplingParams(**one), prompt=(1, 7), seed=seed) for seed, one in enumerate(PARAMS)]  # type: ignore[arg-type]
    found = chain(SIZE, preset=preset).sample(logits_RV.clone(), rows)
    assert len(cut_on_the_host) == num_cuts
    assert found == chain(SIZE, preset=preset, fast=False).sample(logits_RV.clone(), rows)
    assert len(cut_on_the_host) == num_cuts


def test_runs_are_neighbours_in_the_kernels_order() -> None:
    """By name, as the presets and other orders have them."""
    for steps, expected in (
        (PRESETS["default"], [["top_k", "top_p", "min_p"]]),
        (PRESETS["vllm"], [["min_p"], ["top_k", "top_p"]]),
        (PRESETS["llama.cpp"], [["top_k"], ["top_p", "min_p"]]),
        (PRESETS["joint"], [["top_k_top_p", "min_p"]]),
        (("top_p", "top_k", "min_p"), [["top_p"], ["top_k", "min_p"]]),
        (("top_k_top_p", "top_p"), [["top_k_top_p"], ["top_p"]]),
    ):
        runs = runs_of(chain(SIZE, steps=steps)._steps)
        found: dict[int, list[str]] = {}
        for number, first in runs.items():
            found.setdefault(first, []).append(steps[number])
        assert list(found.values()) == expected


def test_a_kernel_that_fails_names_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluglm_samplers.triton.launch.MOST_COLUMNS", 10)
    with pytest.raises(ComponentFailure, match="logits_steps top_k, top_p raised ValueError: rows have 45 logits"):
        chain(SIZE, steps=["top_k", "top_p"]).sample(torch.zeros(1, SIZE), [row(SamplingParams(top_k=3, top_p=0.5))])
