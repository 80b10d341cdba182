"""How long drafts get: against the sum of the series, a plain search for the best length, and counted trials."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.draft_length import MAX_PAUSE, MIN_PAUSE, DraftLength, expected_tokens
from pluglm_spec_decode.step_costs import FixedCosts

FREE, CHEAP, DEAR = FixedCosts(0.0), FixedCosts(0.05), FixedCosts(5.0)


@given(st.floats(0, 1), st.integers(0, 32))
def test_expected_tokens_is_the_sum_of_the_series(acceptance, num_drafts):
    """One token, and each draft with the chance that it and all before it are kept."""
    terms = [acceptance**place for place in range(num_drafts + 1)]
    assert expected_tokens(acceptance, num_drafts) == pytest.approx(sum(terms), rel=1e-9)


def observed(length: DraftLength, outcomes, costs) -> None:
    for num_proposed, num_accepted in outcomes:
        length.observe(num_proposed, num_accepted, costs, 1)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12), st.floats(0.01, 0.3))
def test_the_limit_has_the_best_speedup_while_it_pays(outcomes, draft_cost):
    costs, length = FixedCosts(draft_cost), DraftLength(8)
    observed(length, [(proposed, min(proposed, kept)) for proposed, kept in outcomes], costs)
    limit, share = length.limit(costs, 1), length.acceptance
    assert 0 < share < 1
    speedups = [sum(share**place for place in range(k + 1)) / (1 + draft_cost * k) for k in range(9)]
    if length.is_on:
        assert speedups[limit] == pytest.approx(max(speedups))
    else:
        assert limit <= 1


def test_what_is_kept_makes_drafts_longer_and_what_is_refused_makes_them_shorter():
    length = DraftLength(16, acceptance=0.6)
    limits = [length.limit(CHEAP, 1)]
    for _ in range(6):
        length.observe(limits[-1], limits[-1], CHEAP, 1)
        limits.append(length.limit(CHEAP, 1))
    assert limits == sorted(limits)
    assert limits[-1] > limits[0]
    while limits[-1] and len(limits) < 40:
        length.observe(limits[-1], 0, CHEAP, 1)
        limits.append(length.limit(CHEAP, 1))
    assert limits[-1] == 0
    assert limits[7:] == sorted(limits[7:], reverse=True)


def test_switched_off_it_tries_less_and_less_often():
    length, tried = DraftLength(8), []
    for step in range(2000):
        limit = length.limit(CHEAP, 1)
        if limit and not length.is_on:
            tried.append(step)
        length.observe(limit, 0, CHEAP, 1)
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps == [1 + min(2 ** (place + 1) * MIN_PAUSE, MAX_PAUSE) for place in range(len(gaps))]
    assert len(tried) < 2000 / MAX_PAUSE + 6


def test_a_trial_without_drafts_is_repeated():
    length = DraftLength(8)
    while length.is_on:
        length.observe(1, 0, CHEAP, 1)
    observed(length, [(0, 0)] * MIN_PAUSE, CHEAP)
    for _ in range(5):
        assert length.limit(CHEAP, 1) == 1
        length.observe(0, 0, CHEAP, 1)
    assert length.limit(CHEAP, 1) == 1


def test_it_is_switched_on_again_when_text_becomes_predictable():
    length = DraftLength(8)
    for _ in range(100):
        length.observe(length.limit(CHEAP, 1), 0, CHEAP, 1)
    assert not length.is_on
    steps = 0
    while not length.is_on:
        limit = length.limit(CHEAP, 1)
        length.observe(limit, limit, CHEAP, 1)
        steps += 1
    assert steps <= 4 * MAX_PAUSE
    for _ in range(10):
        limit = length.limit(CHEAP, 1)
        length.observe(limit, limit, CHEAP, 1)
    assert length.limit(CHEAP, 1) == 8


def test_dear_drafts_are_never_made_but_in_trials():
    length = DraftLength(8)
    limits = []
    for _ in range(200):
        limits.append(length.limit(DEAR, 1))
        length.observe(limits[-1], limits[-1], DEAR, 1)  # even if all are kept: 2 tokens for the price of 6
    assert not length.is_on
    assert sum(limits) == 0  # a trial could not change it


def test_a_trial_is_made_when_it_can_change_something():
    """Two tokens for the price of 1.5, if all are kept."""
    costs, length = FixedCosts(0.5), DraftLength(1, acceptance=0.1)
    limits = []
    for _ in range(40):
        limits.append(length.limit(costs, 1))
        length.observe(limits[-1], 0, costs, 1)
    assert 0 < sum(limits) <= 3


def test_near_break_even_it_does_not_flap():
    """One draft at a cost of 0.5 that is kept every other time: the speed-up is 1."""
    generator, length, switches = random.Random(3), DraftLength(1, acceptance=0.5), 0
    costs, was_on = FixedCosts(0.5), True
    for _ in range(2000):
        limit = length.limit(costs, 1)
        length.observe(limit, limit * generator.randint(0, 1), costs, 1)
        switches += length.is_on != was_on
        was_on = length.is_on
    assert switches < 60


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60), st.floats(0.01, 2))
def test_equal_histories_give_equal_limits(outcomes, draft_cost):
    """A stopping time: nothing but what was accepted before and the costs is looked at, and looking leaves no trace."""
    costs, one, other = FixedCosts(draft_cost), DraftLength(8), DraftLength(8)
    for proposed, kept in outcomes:
        assert [one.limit(costs, 1), one.limit(costs, 1)] == [other.limit(costs, 1)] * 2
        one.limit(FREE, 3)
        for length in (one, other):
            length.observe(proposed, min(proposed, kept), costs, 1)
