"""top_p and typical_p of long rows keep what sorting the row keeps, bit for bit, and seldom have to sort it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm_samplers import top_p, typical_p
from pluglm_samplers.blocks import SHORT, in_blocks, masses, mean_below
from pluglm_samplers.mass_prefix import floors, mass_prefix

SIZE = 4 * SHORT + 3
SHARES = (0.0, 1e-300, 1e-6, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9, math.nextafter(1.0, 0.0))
Row = Any  # a row of float32


def smooth(generator: np.random.Generator) -> Row:
    return generator.normal(size=SIZE) * 4


def nearly_flat(generator: np.random.Generator) -> Row:
    return generator.normal(size=SIZE) * 0.01


def equal(generator: np.random.Generator) -> Row:
    return np.full(SIZE, -3.5)


def coarse(generator: np.random.Generator) -> Row:
    return generator.normal(size=SIZE).round() * 2


def half_precise(generator: np.random.Generator) -> Row:
    return torch.from_numpy(generator.normal(size=SIZE) * 6).bfloat16().float().numpy()


def peaked(generator: np.random.Generator) -> Row:
    return np.where(np.arange(SIZE) == generator.integers(SIZE), 30.0, generator.normal(size=SIZE))


def half_masked(generator: np.random.Generator) -> Row:
    return np.where(generator.random(SIZE) < 0.5, -np.inf, generator.normal(size=SIZE) * 3)


def one_alive(generator: np.random.Generator) -> Row:
    return np.where(np.arange(SIZE) == generator.integers(SIZE), -40.0, -np.inf)


def huge(generator: np.random.Generator) -> Row:
    return generator.choice([3.0e38, -3.0e38, 1.0e30, 0.0], size=SIZE)


def far_from_zero(generator: np.random.Generator) -> Row:
    """l - max l rounds many of these to the same."""
    return np.concatenate(([4e4], generator.normal(size=SIZE - 1) * 1e-3 + 0.01))


def both_zeros(generator: np.random.Generator) -> Row:
    return generator.choice([0.0, -0.0, -1.0], size=SIZE)


ROWS = (
    smooth, nearly_flat, equal, coarse, half_precise, peaked, half_masked, one_alive, huge, far_from_zero, both_zeros
)  # fmt: skip


def logits_of(kind: Any, seed: int, temperature: float) -> torch.Tensor:
    logits_V = kind(np.random.default_rng(seed)).astype(np.float32)
    with np.errstate(all="ignore"):
        return torch.from_numpy((logits_V - logits_V.max()) / np.float32(temperature))[None]


def nucleus_by_sorting(logits_RV: torch.Tensor, share: float) -> torch.Tensor:
    sorted_RV = logits_RV.clone()
    top_p._keep_ranked(sorted_RV.numpy(), np.array([[share]]), None)
    return sorted_RV


def typical_by_sorting(logits_RV: torch.Tensor, share: float) -> torch.Tensor:
    host_RV = logits_RV.clone().numpy()
    below_RV, mass_RV, total_R1 = masses(host_RV)
    odd_RV = np.abs(below_RV - mean_below(below_RV, mass_RV, total_R1).astype(np.float32))
    typical_p._drop_odd(host_RV, odd_RV, mass_RV, share * total_R1)
    return torch.from_numpy(host_RV)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ROWS), st.integers(0, 2**32), st.sampled_from(SHARES), st.sampled_from([1.0, 0.3, 1e-5, 50.0]))
def test_what_is_kept_is_what_sorting_keeps(kind: Any, seed: int, share: float, temperature: float) -> None:
    logits_RV = logits_of(kind, seed, temperature)
    with np.errstate(all="ignore"):
        assert torch.equal(top_p.keep_nuclei(logits_RV.clone(), [share], None), nucleus_by_sorting(logits_RV, share))
        typical_RV = in_blocks(typical_p._keep_typical, logits_RV.clone(), np.array([[share]]))
        if int((logits_RV > -torch.inf).sum()) > SHORT:  # fewer are taken side by side, where sums are in another order
            assert torch.equal(typical_RV, typical_by_sorting(logits_RV, share))


def test_rows_of_a_batch_have_their_own_share() -> None:
    logits_RV = torch.cat([logits_of(kind, 3, 0.8) for kind in ROWS])
    shares = [SHARES[number % len(SHARES)] for number in range(len(ROWS))]
    with np.errstate(all="ignore"):
        alone = [nucleus_by_sorting(logits_RV[number : number + 1], share) for number, share in enumerate(shares)]
    assert torch.equal(top_p.keep_nuclei(logits_RV.clone(), shares, None), torch.cat(alone))


@pytest.mark.parametrize("kind", [smooth, nearly_flat, equal, coarse, half_precise, peaked, half_masked])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.999])
def test_rows_are_seldom_sorted(kind: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above is not about sorting alone."""

    def refuse(*some: Any) -> None:
        raise RuntimeError("sorted")

    monkeypatch.setattr(top_p, "_keep_ranked", refuse)
    monkeypatch.setattr(typical_p, "_drop_odd", refuse)
    top_p.keep_nuclei(logits_of(kind, 5, 0.8), [share], None)
    in_blocks(typical_p._keep_typical, logits_of(kind, 5, 0.8), np.array([[share]]))


@pytest.mark.parametrize("num_live", [SHORT + 1, 2048, 4096])
@pytest.mark.parametrize("share", [2.0**-10, 0.25, 0.5, 0.3, 0.9])
def test_of_equal_logits_the_first_ids_stay(num_live: int, share: float) -> None:
    """By hand: ceil(share * n) of n, an exact one too where sums reach exactly what is wanted."""
    logits_RV = torch.full((1, SIZE), -torch.inf)
    logits_RV[0, 1 : 1 + num_live] = 2.0
    expected = list(range(1, 1 + math.ceil(share * num_live)))
    typical_RV = in_blocks(typical_p._keep_typical, logits_RV.clone(), np.array([[share]]))
    for kept_RV in (top_p.keep_nuclei(logits_RV.clone(), [share], None), typical_RV):
        assert torch.nonzero(kept_RV[0] > -torch.inf).flatten().tolist() == expected


def test_a_sum_that_is_too_close_to_tell_is_not_told() -> None:
    """Unless sums are exact: of equal masses of a power of two."""
    generator = np.random.default_rng(0)
    mass_V = np.sort(generator.random(SIZE).astype(np.float32) ** 8)[::-1].copy()
    rank_V = np.arange(SIZE, dtype=np.float32)
    wanted = float(mass_V[:100].astype(np.float64).sum())
    assert mass_prefix(rank_V, mass_V, wanted, [float(SIZE)]) is None
    found = mass_prefix(rank_V, mass_V, wanted * (1 + 1e-9), [float(SIZE)])
    assert found is not None
    assert found.tolist() == list(range(101))
    exact = mass_prefix(rank_V, np.full(SIZE, 0.5, dtype=np.float32), 50.0, [float(SIZE)])
    assert exact is not None
    assert exact.tolist() == list(range(100))


def test_ranks_that_do_not_reach_the_mass_are_passed_over() -> None:
    rank_V, mass_V = np.arange(SIZE, dtype=np.float32), np.full(SIZE, 0.5, dtype=np.float32)
    for ceilings, expected in (([-1.0, 3.0, 2e3], 100), ([2e3], 100), ([3.0], None), ([], None)):
        found = mass_prefix(rank_V, mass_V, 49.75, ceilings)
        assert (None if found is None else len(found)) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((smooth, nearly_flat, coarse, peaked, half_masked)), st.integers(0, 2**32), st.sampled_from(SHARES)
)
def test_the_sure_floor_drops_no_more_than_may_be_dropped(kind: Any, seed: int, share: float) -> None:
    below_V = logits_of(kind, seed, 0.8)[0].double().numpy()
    spare = (1 - share) * float(np.exp(below_V).sum())
    sure = list(floors(below_V.astype(np.float32), spare))[-1]
    assert float(np.exp(below_V[below_V < sure]).sum()) <= spare
