"""How long drafts get: against a plain search for the best length, and counted trials. One sequence, given costs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.draft_length import HORIZON, MARGIN, DraftLengths, Wish
from pluglm_spec_decode.step_costs import FixedCosts
from pluglm_spec_decode.trials import MAX_PAUSE, SHARE

CHEAP, DEAR = 0.05, 5.0


class One:
    """A sequence that could have `most` drafts of class 0 in every step."""

    def __init__(self, draft_cost: float, most: int = 8, acceptance: float = 0.7) -> None:
        self.costs, self.most = FixedCosts(draft_cost), most
        self.lengths = DraftLengths(self.costs, (acceptance,))

    @property
    def limit(self) -> int:
        return self.lengths.limits([Wish(0, [0] * self.most)])[0]

    def step(self, num_kept: int) -> int:
        """The drafts of a step that keeps so many of them, if there are."""
        limit = self.limit
        self.observe(limit, min(limit, num_kept))
        return limit

    def observe(self, num_proposed: int, num_kept: int) -> None:
        self.lengths.observe(0, [0] * num_proposed, num_kept)
        self.lengths.end_step(self.costs.times(1, num_proposed)[num_proposed])


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12), st.floats(0.01, 0.3))
def test_the_limit_has_the_best_speedup_while_it_pays(outcomes, draft_cost):
    one = One(draft_cost)
    for proposed, kept in outcomes:
        one.observe(proposed, min(proposed, kept))
    [share] = one.lengths.acceptance.survival(0, [0])
    speedups = [sum(share**place for place in range(k + 1)) / (1 + draft_cost * k) for k in range(9)]
    if max(speedups) >= MARGIN:
        assert speedups[one.limit] == pytest.approx(max(speedups))
    else:
        assert one.limit == 0  # in so few steps there is no trial


def test_what_is_kept_makes_drafts_longer_and_what_is_refused_makes_them_shorter():
    one = One(0.2, most=16, acceptance=0.6)
    longer = [one.step(16) for _ in range(8)]
    assert longer == sorted(longer)
    assert longer[-1] > longer[0]
    shorter = [one.step(0) for _ in range(100)]
    assert 0 in shorter
    assert shorter[: shorter.index(0)] == sorted(shorter[: shorter.index(0)], reverse=True)
    assert sum(shorter[-20:]) <= 4


def test_switched_off_it_tries_less_and_less_often():
    one = One(0.2)
    drafts = [one.step(0) for _ in range(20_000)]
    tried = sum(drafts[200:])
    assert 0 < tried * 0.2 <= SHARE * 20_000
    assert tried <= 20_000 / MAX_PAUSE + 16


def test_it_is_switched_on_again_when_text_becomes_predictable():
    one = One(CHEAP)
    for _ in range(100):
        one.step(0)
    assert one.step(0) == 0
    assert [one.step(8) for _ in range(4 * MAX_PAUSE)][-1] == 8


def test_dear_drafts_are_never_made():
    """Even if all are kept: 2 tokens for the price of 6. A trial could not change it."""
    one = One(DEAR)
    assert [one.step(8) for _ in range(3 * MAX_PAUSE)] == [0] * (3 * MAX_PAUSE)


def test_a_trial_is_made_when_it_can_change_something():
    """Two tokens for the price of 1.5, if all are kept."""
    one = One(0.5, most=1, acceptance=0.1)
    drafts = [one.step(0) for _ in range(2000)]
    assert 0 < sum(drafts) * 0.5 <= SHARE * 2000


def test_near_break_even_it_does_not_flap():
    """One draft at a cost of 0.5 that is kept every other time: the speed-up is 1, and little is lost."""
    generator, one, time, tokens, limits = random.Random(3), One(0.5, most=1, acceptance=0.5), 0.0, 0, []
    for _ in range(5000):
        kept = generator.randint(0, 1)
        limits.append(one.step(kept))
        time, tokens = time + 1 + 0.5 * limits[-1], tokens + 1 + limits[-1] * kept
    assert sum(before != after for before, after in pairwise(limits)) < 500
    assert tokens / time > 0.97


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60), st.floats(0.01, 2))
def test_equal_histories_give_equal_limits(outcomes, draft_cost):
    """A stopping time: nothing but what was kept before and the costs is looked at, and looking leaves no trace."""
    one, other = One(draft_cost), One(draft_cost)
    for proposed, kept in outcomes:
        assert [one.limit, one.limit] == [other.limit] * 2
        one.lengths.limits([Wish(7, [0] * 3), Wish(8, [0])])
        assert one.limit == other.limit
        for each in (one, other):
            each.observe(proposed, min(proposed, kept))


def test_catching_up_is_weighed_against_the_steps_that_are_left():
    """A draft gains 0.8 - 0.1 tokens a step: 22 in HORIZON steps, and 2 in three. Catching up takes six plain steps."""
    lengths = DraftLengths(FixedCosts(0.1), (0.8,))
    lengths.drafting.note(1, 0, 0.0)
    lengths.drafting.token_time = 6 / 300
    assert lengths.limits([Wish(0, [0], num_behind=300)]) == [1]
    assert lengths.limits([Wish(0, [0], num_behind=300, num_left=3)]) == [0]
    assert lengths.limits([Wish(0, [0], num_behind=0, num_left=3)]) == [1]
    lengths.drafting.token_time = HORIZON / 300
    assert lengths.limits([Wish(0, [0], num_behind=300)]) == [0]
