"""Truncations where the answer is known without arithmetic: exact boundaries, ties, closed forms, renormalisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampler_cases import kept, random_logits, row, step, transformed

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.presets import PRESETS

DEFAULT = PRESETS["default"]
INF = math.inf
EIGHT = [1.5] * 8  # every probability is exactly 1/8


def logs(*probabilities: float) -> list[float]:
    return [math.log(one) for one in probabilities]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # the prefix with mass >= p has ceil(8 p) tokens, and ties rank by id
        *(({"top_p": p}, range(n)) for p, n in ((0.125, 1), (0.1251, 2), (0.5, 4), (0.5001, 5), (0.875, 7), (0.0, 1))),
        *(({"typical_p": p}, range(n)) for p, n in ((0.125, 1), (0.1251, 2), (0.5, 4), (0.875, 7), (0.0, 1))),
        ({"min_p": 1.0}, range(8)), ({"top_k": 3}, range(3)),
        ({"epsilon_cutoff": 0.125}, range(8)), ({"epsilon_cutoff": 0.126}, range(8)), ({"eta_cutoff": 0.9}, range(8)),
        ({"top_n_sigma": 1e-9}, range(8)),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.125}, [7]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1251}, range(8)),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.0}, [7]),
    ],
)  # fmt: skip
def test_eight_equal_logits(params: dict[str, Any], expected: Any) -> None:
    assert kept(DEFAULT, EIGHT, **params) == list(expected)


def test_top_n_sigma_is_exact_on_two_values() -> None:
    """1 and -1 as often: mean 0, deviation 1; a masked token is none of the values."""
    logits = [1.0, -1.0, -INF, 1.0, -1.0, -INF]
    assert kept(DEFAULT, logits, top_n_sigma=2.0) == [0, 1, 3, 4]
    assert kept(DEFAULT, logits, top_n_sigma=1.999) == [0, 3]


def test_epsilon_and_eta_on_binary_fractions() -> None:
    logits = logs(0.5, 0.25, 0.125, 0.0625, 0.0625)  # H = 1.875 ln 2, so exp(-H) = 2 ** -1.875 = 0.2726
    assert kept(DEFAULT, logits, epsilon_cutoff=0.1) == [0, 1, 2]
    assert kept(DEFAULT, logits, epsilon_cutoff=0.9) == [0]
    # sqrt(0.1) * 0.2726 = 0.0862 is the smaller one; sqrt(0.01) * 0.2726 = 0.0273 is the larger one, so 0.01 counts
    assert kept(DEFAULT, logits, eta_cutoff=0.1) == [0, 1, 2]
    assert kept(DEFAULT, logits, eta_cutoff=0.01) == [0, 1, 2, 3, 4]


def test_typical_may_drop_the_best_token_and_is_inclusive() -> None:
    # H = 1.748: the best token's surprise 0.916 is 0.832 off, that of the others, 2.303, only 0.555.
    logits = logs(0.4, *[0.1] * 6)
    assert kept(DEFAULT, logits, typical_p=0.45) == [1, 2, 3, 4, 5]
    assert kept(DEFAULT, logits, typical_p=0.35) == [1, 2, 3, 4]  # the fourth reaches the mass and stays
    assert kept(DEFAULT, logits, typical_p=0.61) == [0, 1, 2, 3, 4, 5, 6]


def test_ties_rank_by_id_and_masked_tokens_never_return() -> None:
    assert kept(DEFAULT, [0.0, 2.0, 1.0, 2.0, 1.0, 1.0], top_k=4) == [1, 2, 3, 4]
    assert kept(DEFAULT, [-INF, 1.0, -INF, 1.0], top_k=3) == [1, 3]
    assert kept(DEFAULT, [-INF, 1.0, -INF, 1.0], top_p=0.5) == [1]
    assert kept(DEFAULT, [-INF, 1.0, -INF, 1.0], typical_p=0.5) == [1]
    assert kept(DEFAULT, [-INF, 1.0, -INF, 1.0], xtc_probability=1.0) == [3]
    everything = {"top_p": 0.3, "min_p": 0.9, "top_k": 2, "typical_p": 0.1, "top_n_sigma": 0.1, "epsilon_cutoff": 0.9,
                  "eta_cutoff": 0.9, "xtc_probability": 1.0, "temperature": 1e-4, "dynatemp_high": 1e-4}  # fmt: skip
    assert kept(DEFAULT, [-INF, -INF, 7.0], **everything) == [2]


def test_each_stage_sees_what_the_one_before_kept() -> None:
    # p = 0.4, 0.3, 0.3: top_k=2 leaves 4/7 and 3/7, so top_p=0.55 keeps one token (on the raw row it would keep two).
    logits = logs(0.4, 0.3, 0.3)
    assert kept(DEFAULT, logits, top_p=0.55) == [0, 1]
    assert kept(DEFAULT, logits, top_p=0.55, top_k=2) == [0]
    assert kept(PRESETS["joint"], logits, top_p=0.55, top_k=2) == [0, 1]
    assert kept(PRESETS["joint"], logits, top_p=0.75, top_k=2) == [0, 1]
    assert kept(PRESETS["joint"], logits, top_p=0.75) == [0, 1, 2]


def test_xtc_keeps_the_least_likely_of_the_top_choices() -> None:
    logits = logs(0.4, 0.3, 0.18, 0.12)
    always = {"xtc_probability": 1.0}
    assert kept(DEFAULT, logits, **always, xtc_threshold=0.15) == [2, 3]
    assert kept(DEFAULT, logits, **always, xtc_threshold=0.35) == [0, 1, 2, 3]  # one such token: no effect
    assert kept(DEFAULT, logits, **always, xtc_threshold=0.6) == [0, 1, 2, 3]
    assert kept(DEFAULT, logits, **always) == [3]  # the threshold is 0.1 unless given
    assert kept(["xtc"], logits, temperature=0.0, **always) == [0, 1, 2, 3]


def test_the_coin_of_xtc_is_keyed_by_seed_lane_and_position() -> None:
    one = step("xtc", 2)
    params = SamplingParams(xtc_probability=0.5)
    keys = [(seed, lane, position) for seed in range(20) for lane in range(5) for position in range(20)]
    rows = [row(params, seed=seed, lane=lane, position=position) for seed, lane, position in keys]
    fired = {
        key: int(value) for key, value in zip(keys, one.apply(torch.zeros(2000, 2), rows)[:, 0] == -INF, strict=True)
    }
    assert 900 < sum(fired.values()) < 1100  # six standard deviations of 2000 fair coins are 134
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        moved = [tuple(a + b for a, b in zip(key, other, strict=True)) for key in keys]
        differ = [fired[key] != fired[next_key] for key, next_key in zip(keys, moved, strict=True) if next_key in fired]
        assert 0.4 < sum(differ) / len(differ) < 0.6


def test_nucleus_larger_than_the_head_needs_the_full_sort() -> None:
    assert kept(DEFAULT, [0.0] * 4096, top_p=0.75) == list(range(3072))


@pytest.mark.parametrize("name", ["top_k", "min_p"])
def test_these_are_idempotent(name: str) -> None:
    rows = [row(SamplingParams(top_k=3, min_p=0.2))] * 64
    once_RV = transformed([name], random_logits(64, 17, seed=3), rows)
    assert torch.equal(transformed([name], once_RV, rows), once_RV)


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5])
def test_min_p_after_temperature_is_its_power_before_it(ratio: float) -> None:
    """p ** (1/T) >= r max p ** (1/T) is p >= r ** T max p."""
    logits_RV = random_logits(64, 17, seed=6)
    after_RV = transformed(
        ["temperature", "min_p"], logits_RV, [row(SamplingParams(temperature=2.0, min_p=ratio))] * 64
    )
    before_RV = transformed(["min_p"], logits_RV, [row(SamplingParams(min_p=ratio**2))] * 64)
    assert torch.equal(after_RV > -INF, before_RV > -INF)


def test_the_set_of_top_n_sigma_is_the_same_at_any_temperature() -> None:
    logits_RV = random_logits(64, 17, seed=8)
    names = ["temperature", "top_n_sigma"]
    sets = [
        transformed(names, logits_RV, [row(SamplingParams(temperature=heat, top_n_sigma=0.9))] * 64) > -INF
        for heat in (0.25, 1.0, 4.0)
    ]
    assert torch.equal(sets[0], sets[1])
    assert torch.equal(sets[1], sets[2])
