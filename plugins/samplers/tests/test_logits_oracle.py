"""The steps, one by one and in every preset, against the float64 oracle: same kept set, same probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import random_logits, random_params, random_row, row, step, transformed
from sampling_oracle import STEPS, after, distribution

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.presets import PRESETS

SIZES = (5, 17, 1000)


def compare(names: Sequence[str], logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> int:
    """How many rows were compared: not those where float32 may decide a comparison either way."""
    result_RV = transformed(names, logits_RV, rows)
    assert not bool((result_RV == torch.inf).any())
    compared = 0
    for logits_V, result_V, one in zip(logits_RV.double().numpy(), result_RV, rows, strict=True):
        expected, margin = distribution(names, logits_V, one)
        if margin < 1e-4:
            continue
        found = result_V.double().softmax(-1).nan_to_num(0.0).numpy()
        np.testing.assert_array_equal(found > 1e-300, expected > 1e-300, err_msg=repr(one))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6, err_msg=repr(one))
        compared += 1
    return compared


def rows_with(names: Sequence[str], vocab_size: int, count: int = 200) -> list[SampleRow]:
    """Random rows of which each has at least the parameters of these steps set at random."""
    generator = np.random.default_rng(vocab_size)
    read = {parameter for name in names for parameter in step(name, vocab_size).parameters}
    rows = []
    for _ in range(count):
        one = random_row(generator, vocab_size)
        chosen = {name: value for name, value in random_params(generator, vocab_size).items() if name in read}
        rows.append(replace(one, params=SamplingParams(**chosen), position=len(one.output_token_ids)))
    return rows


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("name", STEPS)
def test_every_step_alone_equals_the_oracle(name: str, vocab_size: int) -> None:
    rows = rows_with([name], vocab_size, count=200 if vocab_size < 1000 else 80)
    compared = compare([name], random_logits(len(rows), vocab_size, seed=vocab_size), rows)
    assert compared > 0.7 * len(rows)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_equals_the_oracle(preset: Any, vocab_size: int) -> None:
    """Without ties: arithmetic makes new ones, which float32 and float64 round apart."""
    rows = rows_with(PRESETS[preset], vocab_size, count=200 if vocab_size < 1000 else 60)
    compared = compare(PRESETS[preset], random_logits(len(rows), vocab_size, vocab_size + 1, ties=False), rows)
    assert compared > 0.5 * len(rows)


@pytest.mark.parametrize("name", STEPS)
def test_the_largest_vocabulary(name: str) -> None:
    """Of Qwen2.5; the last ids are rows of padding, masked before any step."""
    vocab_size = 151_936
    rows = rows_with([name], vocab_size, count=2)
    logits_RV = random_logits(2, vocab_size, seed=7)
    logits_RV[:, 151_643:] = -torch.inf
    result_RV = transformed([name], logits_RV, rows)
    for logits_V, result_V, one in zip(logits_RV.double().numpy(), result_RV, rows, strict=True):
        expected, _ = after([name], logits_V, one)
        assert not bool((result_V[151_643:] > -torch.inf).any())
        # float32 may decide a comparison either way, at the threshold alone
        assert abs(int((result_V > -torch.inf).sum()) - int((expected > -np.inf).sum())) <= 2


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_penalties_equal_the_oracle(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([3, 9]))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=8)
    logits = data.draw(
        st.lists(st.sampled_from([-3.5, -1.0, 0.0, 0.25, 2.0]), min_size=vocab_size, max_size=vocab_size)
    )
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        frequency_penalty=data.draw(st.sampled_from([-0.5, 0.0, 0.3])),
        presence_penalty=data.draw(st.sampled_from([-1.0, 0.0, 0.6])),
        dry_multiplier=data.draw(st.sampled_from([0.0, 0.7])),
        dry_allowed_length=data.draw(st.integers(1, 3)),
        dry_breaker_ids=tuple(data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=2))),
    )
    one = row(params, prompt=tuple(data.draw(ids)), output=tuple(data.draw(ids)))
    names = ["repetition_penalty", "frequency_penalty", "presence_penalty", "dry"]
    result_RV = transformed(names, torch.tensor([logits]), [one])
    np.testing.assert_allclose(result_RV[0].numpy(), after(names, np.array(logits), one)[0], rtol=1e-6, atol=1e-6)


def test_tiny_and_huge_values_stay_finite_and_never_empty_a_row() -> None:
    extreme = [3e38, -3e38, 1e-30, 0.0]
    for params in (
        {"temperature": 1.1e-5}, {"temperature": 1e300}, {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300},
        {"frequency_penalty": 1e300}, {"frequency_penalty": -1e300}, {"presence_penalty": 3.4e38},
        {"logit_bias": {0: 1e300, 1: -1e300}}, {"dry_multiplier": 1e300, "dry_base": 1e300, "dry_allowed_length": 1},
        {"dynatemp_high": 1e-300}, {"dynatemp_low": 1e300, "dynatemp_high": 1e300}, {"dynatemp_exponent": 1e300},
        {"top_n_sigma": 1e300}, {"top_n_sigma": 1e-300}, {"typical_p": 1e-300}, {"epsilon_cutoff": 1 - 1e-16},
        {"eta_cutoff": 1 - 1e-16}, {"eta_cutoff": 1e-300}, {"xtc_probability": 1.0, "xtc_threshold": 1e-300},
    ):  # fmt: skip
        one = row(SamplingParams(**params), prompt=(0, 1, 2, 3), output=(0, 0, 1, 2, 3))  # type: ignore[arg-type]
        result_RV = transformed(PRESETS["default"], torch.tensor([extreme]), [one])
        assert not bool(result_RV.isnan().any())
        assert bool(result_RV.amax(-1).isfinite().all())


def test_ids_outside_the_vocabulary_are_an_error() -> None:
    for bad in (-1, 4):
        for params in (
            {"presence_penalty": 1.0}, {"dry_multiplier": 1.0}, {"allowed_token_ids": (bad,)},
            {"bad_words_ids": ((bad,),)}, {"min_tokens": 5, "stop_token_ids": (bad,)}, {"logit_bias": {bad: 1.0}},
        ):  # fmt: skip
            one = row(SamplingParams(**params), output=(bad,))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="leave the vocabulary of 4"):
                transformed(PRESETS["default"], torch.zeros(1, 4), [one])


def test_neutral_parameters_leave_every_bit() -> None:
    logits_RV = random_logits(8, 17, seed=1)
    neutral = [row(prompt=(1, 2, 1), output=(3, 1, 2))] * 8
    assert torch.equal(transformed(list(STEPS), logits_RV, neutral), logits_RV)


@pytest.mark.parametrize("name", STEPS)
def test_argmax_invariance_is_true_where_it_is_claimed(name: str) -> None:
    rows = rows_with([name], 17, count=1500)
    one = step(name, 17)
    logits_RV = random_logits(len(rows), 17, seed=4)
    active = [index for index, some in enumerate(rows) if one.is_active(some.params)]
    changed_RV = one.apply(logits_RV[active].clone(), [rows[index] for index in active])
    moved = bool((changed_RV.argmax(-1) != logits_RV[active].argmax(-1)).any())
    assert moved != one.argmax_invariant
