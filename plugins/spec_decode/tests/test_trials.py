"""Counted trials and what they cost."""

from __future__ import annotations

from itertools import pairwise

from pluglm_spec_decode.trials import MAX_PAUSE, MIN_PAUSE, SHARE, Trials


def failing(cost: float, steps: int) -> list[int]:
    """The steps in which a trial was made that cost so much of a step and failed."""
    trials, tried = Trials(), []
    for step in range(steps):
        if trials.is_due(0) and trials.can_pay(cost):
            trials.failed(0, cost)
            tried.append(step)
        trials.end_step(1.0)
    return tried


def test_cheap_ones_become_rarer_by_half_each_time():
    tried = failing(0.01, 4 * MAX_PAUSE)
    gaps = [after - before for before, after in pairwise(tried)]
    assert tried[0] == MIN_PAUSE
    assert gaps == [min(2 ** (place + 1) * MIN_PAUSE, MAX_PAUSE) for place in range(len(gaps))]


def test_dear_ones_wait_until_they_can_be_paid_for():
    for cost in (0.5, 3.0, 20.0):
        tried = failing(cost, 20_000)
        assert 0 < len(tried) * cost <= SHARE * 20_000


def test_what_succeeds_may_go_on_and_what_pays_is_soon_tried_again():
    trials = Trials()
    for _ in range(3 * MIN_PAUSE):
        trials.end_step(1.0)
    assert [trials.succeeded(0, 0.0) for _ in range(3)] == [1, 2, 3]
    trials.seen(0)
    assert trials.is_due(0)
    trials.paid(0)
    trials.seen(0)
    assert not trials.is_due(0)
    for _ in range(MIN_PAUSE):
        trials.end_step(1.0)
    assert trials.is_due(0)
    trials.failed(0, 0.0)
    assert trials.succeeded(0, 0.0) == 1
