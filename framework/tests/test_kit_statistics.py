"""The cell test: correct laws pass at the stated rate, wrong ones are refused, a zero cell forgives nothing."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pluglm.testing.statistics import cell_test


def counts_of(law: list[float], size: int, seed: int) -> list[int]:
    drawn = Counter(random.Random(seed).choices(range(len(law)), weights=law, k=size))
    return [drawn[cell] for cell in range(len(law))]


def test_a_correct_law_passes() -> None:
    law = [0.5, 0.3, 0.15, 0.05]
    assert all(cell_test(counts_of(law, 5000, seed), law, 1e-6) is None for seed in range(100))


def test_alarms_are_rarer_than_delta() -> None:
    """delta 0.1 over 300 correct runs: the bound allows 30, and 3 standard deviations of that 46."""
    law = [0.2, 0.8]
    alarms = sum(cell_test(counts_of(law, 500, seed), law, 0.1) is not None for seed in range(300))
    assert alarms <= 30


@pytest.mark.parametrize(("expected", "shift"), [(0.5, 0.038), (0.05, 0.018), (0.005, 0.007)])
def test_a_shift_of_the_published_size_is_found(expected: float, shift: float) -> None:
    """20 000 draws and 2 cells; the shifts are those that a limit of 27 cells misses once in a million runs."""
    drawn = round(20_000 * (expected + shift))
    problem = cell_test([drawn, 20_000 - drawn], [expected, 1 - expected], 1e-6)
    assert problem is not None
    assert problem.startswith("cell 0")


def test_the_limit_is_that_of_the_closed_form() -> None:
    """One cell of probability 1/2: N * KL = N * (ln 2 + p ln p + q ln q) against ln(2 C / delta)."""
    size, limit = 1000, math.log(2 * 2 / 1e-6)

    def divergence(count: int) -> float:
        p = count / size
        return size * (math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p))

    first = next(count for count in range(500, size) if divergence(count) > limit)
    assert cell_test([first, size - first], [0.5, 0.5], 1e-6) is not None
    assert cell_test([first - 1, size - first + 1], [0.5, 0.5], 1e-6) is None


def test_one_hit_in_a_zero_cell_fails() -> None:
    assert cell_test([9999, 1], [1.0, 0.0], 1e-12) is not None
    assert cell_test([10_000, 0], [1.0, 0.0], 1e-12) is None
