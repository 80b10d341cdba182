"""The kernel of top_k, top_p and min_p in triton's interpreter: kept sets of the float64 oracle, and exact ties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sampler_cases import row
from sampling_oracle import after
from triton import knobs

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.triton.launch import cut_rows

SIZE = 75
ORDER = ("top_k", "top_p", "min_p")
JOINT_ORDER = ("top_k_top_p", "min_p")
INF = math.inf


def cut(logits_RV: torch.Tensor, params: Sequence[SamplingParams], is_joint: bool) -> list[list[int]]:
    """Ids kept of each row."""
    size = logits_RV.shape[1]
    top_k = [one.top_k if 0 < one.top_k < size else size for one in params]
    gaps = [math.log(one.min_p) if one.min_p > 0 else -INF for one in params]
    result_RV = cut_rows(
        logits_RV.clone(),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor([one.top_p for one in params], dtype=torch.float64),
        torch.tensor(gaps),
        is_joint,
    )
    is_kept_RV = result_RV > -INF
    assert torch.equal(result_RV[is_kept_RV], logits_RV[is_kept_RV])
    return [kept_V.nonzero().flatten().tolist() for kept_V in is_kept_RV]


def rows_of_logits(seed: int) -> torch.Tensor:
    """Continuous, of many ties, half masked, one token alive, negative, flat."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(6, SIZE, generator=generator) * 3
    logits_RV[1] = logits_RV[1].round()
    logits_RV[2, ::2] = -INF
    logits_RV[3, 1:] = -INF
    logits_RV[4] -= 200.0
    logits_RV[5] = 0.0
    return logits_RV


def test_kernels_are_interpreted() -> None:
    assert knobs.runtime.interpret


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_kept_sets_are_those_of_the_oracle(seed: int, is_joint: bool) -> None:
    logits_RV = rows_of_logits(seed)
    generator = np.random.default_rng(seed)
    params = [
        SamplingParams(
            top_k=int(generator.choice([0, 1, 5, 40])),
            top_p=float(generator.choice([1.0, 0.9, 0.33])),
            min_p=float(generator.choice([0.0, 0.02, 0.3])),
        )
        for _ in logits_RV
    ]
    compared = 0
    for found, logits_V, one in zip(cut(logits_RV, params, is_joint), logits_RV.double().numpy(), params, strict=True):
        expected, margin = after(JOINT_ORDER if is_joint else ORDER, logits_V, row(one))
        if margin > 1e-6:
            assert found == np.flatnonzero(expected > -INF).tolist(), one
            compared += 1
    assert compared >= 4


def test_ties_go_by_lowest_id_across_blocks() -> None:
    """By hand. Of 75 equal tokens, ten; of ten, the smallest prefix with 0.45 is five. Both zeros are equal."""
    flat_V = torch.zeros(SIZE)
    flat_V[::2] = -0.0
    peaks_V = torch.full((SIZE,), -1.0)
    peaks_V[[70, 40, 3]] = 2.0
    params = [SamplingParams(top_k=10, top_p=0.45), SamplingParams(top_k=40), SamplingParams(top_k=2)]
    found = cut(torch.stack([flat_V, flat_V, peaks_V]), params, False)
    assert found == [list(range(5)), list(range(40)), [3, 40]]


def test_top_p_is_exact_on_the_boundary_and_zero_keeps_one() -> None:
    """Of 64 equal tokens, 0.25 of the mass is 16."""
    logits_V = torch.full((SIZE,), -INF)
    logits_V[:64] = 7.5
    params = [SamplingParams(top_p=0.25), SamplingParams(top_p=0.0), SamplingParams(min_p=1.0)]
    found = cut(logits_V.repeat(3, 1), params, False)
    assert found == [list(range(16)), [0], list(range(64))]


@pytest.mark.parametrize("odd", [math.nan, INF])
def test_a_broken_row_stays_and_touches_no_other(odd: float) -> None:
    logits_RV = torch.zeros(3, SIZE)
    logits_RV[0, 50] = odd
    logits_RV[1] = -INF
    neutral = torch.full((3,), 4, dtype=torch.int32), torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), -INF)
    result_RV = cut_rows(logits_RV.clone(), *neutral, False)
    torch.testing.assert_close(result_RV[:2], logits_RV[:2], rtol=0, atol=0, equal_nan=True)
    assert (result_RV[2] > -INF).nonzero().flatten().tolist() == [0, 1]


def test_what_does_not_fit_is_refused() -> None:
    k_R, p_R, gap_R = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64), torch.zeros(2)
    for wrong, message in (
        ((torch.zeros(2, 9).half(), k_R, p_R, gap_R), "logits_RV"),
        ((torch.zeros(2, 9), k_R.long(), p_R, gap_R), "top_k_R"),
        ((torch.zeros(2, 9), k_R, p_R[:1], gap_R), "top_p_R"),
        ((torch.zeros(2, (1 << 18) + 1), k_R, p_R, gap_R), "262145 logits"),
    ):
        with pytest.raises(ValueError, match=message):
            cut_rows(*wrong, False)
