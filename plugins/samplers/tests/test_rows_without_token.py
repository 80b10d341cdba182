"""A row that nothing can be drawn from is NO_TOKEN, alone: its neighbours get what they get without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampler_cases import chain, context, random_logits, row, step
from sampling_oracle import STEPS

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.greedy import GreedySampler
from pluglm_samplers.presets import PRESETS

INF = math.inf
EMPTY = {
    "allow list beside the only live token": {"allowed_token_ids": (1, 2)},
    "bad words of everything": {"bad_words_ids": tuple((token,) for token in range(17))},
    "allow list and bad words": {"allowed_token_ids": (0, 3), "bad_words_ids": ((0,), (3,))},
    "min_tokens and an allow list of stop tokens": {
        "min_tokens": 3, "stop_token_ids": (0, 5), "allowed_token_ids": (0, 5),
    },
}  # fmt: skip
SHAPES: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "logit_bias": {2: 50.0}},
)  # fmt: skip

ACTIVE: dict[str, Any] = {
    "temperature": 0.7, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_n_sigma": 1.0,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "xtc_probability": 1.0, "dynatemp_high": 1.5, "repetition_penalty": 1.3,
    "frequency_penalty": -0.2, "presence_penalty": -0.1, "dry_multiplier": 1.0, "dry_allowed_length": 1,
    "logit_bias": {2: 5.0}, "allowed_token_ids": (0, 2, 3), "bad_words_ids": ((1,),), "min_tokens": 9,
    "stop_token_ids": (1,),
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("why", EMPTY)
def test_an_emptied_row_fails_alone(preset: Any, why: str) -> None:
    logits_RV = random_logits(12, 17, seed=3)
    logits_RV[5, 1:] = -INF
    sampler = chain(17, preset=preset)
    for shape in SHAPES:
        rows = [row(SamplingParams(**SHAPES[index % 4]), output=(1, 2), seed=index) for index in range(12)]
        expected = sampler.sample(logits_RV.clone(), rows)
        assert NO_TOKEN not in expected
        rows[5] = row(SamplingParams(**{**shape, **EMPTY[why]}), output=(1, 2))
        assert sampler.sample(logits_RV.clone(), rows) == [*expected[:5], NO_TOKEN, *expected[6:]]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("name", STEPS)
def test_a_broken_row_stays_broken_and_leaves_the_others(name: str, bad: float) -> None:
    """Of a plugin's step, before this one; hard masks may ban the token that is not a number."""
    rows = [row(SamplingParams(**ACTIVE), output=(0, 1, 0), seed=index) for index in range(3)]
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 0.5]]).repeat(3, 1)
    one = step(name, 4)
    alone = [one.apply(logits_RV[index : index + 1].clone(), rows[index : index + 1])[0] for index in (0, 2)]
    logits_RV[1, 3] = bad
    found_RV = one.apply(logits_RV, rows)
    assert torch.equal(found_RV[0], alone[0])
    assert torch.equal(found_RV[2], alone[1])
    assert not bool(found_RV[1].softmax(-1).isfinite().all())


@pytest.mark.parametrize("name", STEPS)
def test_an_empty_row_stays_empty(name: str) -> None:
    found_RV = step(name, 4).apply(torch.full((1, 4), -INF), [row(SamplingParams(**ACTIVE), output=(0, 1, 0))])
    assert not bool((found_RV > -INF).any())


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(bad: float, temperature: float) -> None:
    logits_RV = torch.zeros(3, 5)
    logits_RV[1] = bad
    params = SamplingParams(temperature=temperature)
    good = chain(5).sample(torch.zeros(3, 5), [row(params)] * 3)
    assert chain(5).sample(logits_RV.clone(), [row(params)] * 3) == [good[0], NO_TOKEN, good[2]]
    greedy = GreedySampler(ComponentConfig(), context(5))
    assert greedy.sample(logits_RV, [row(SamplingParams(temperature=0.0))] * 3) == [0, NO_TOKEN, 0]
