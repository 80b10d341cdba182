"""The lengths of a batch against all lengths that there are, and against the closed form for one sequence."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.batch_lengths import best_lengths, least_worth

chances = st.lists(st.lists(st.floats(0.01, 0.99), max_size=3), min_size=1, max_size=3)
steps = st.lists(st.floats(0, 2), min_size=9, max_size=9)


def survival(some: list[float]) -> list[float]:
    return list(accumulate(some, mul))


def speed(worth: list[list[float]], lengths: tuple[int, ...], seconds: list[float]) -> float:
    tokens = len(worth) + sum(sum(some[:num]) for some, num in zip(worth, lengths, strict=True))
    return tokens / seconds[sum(lengths)]


@given(chances, steps)
def test_no_other_lengths_give_more_tokens_a_second(some, slopes):
    worth, seconds = [survival(one) for one in some], list(accumulate(slopes, initial=1.0))
    drafts, speedup = best_lengths(worth, seconds)
    best = max(speed(worth, lengths, seconds) for lengths in product(*(range(len(one) + 1) for one in worth)))
    assert speed(worth, tuple(drafts), seconds) == pytest.approx(best)
    assert speedup == pytest.approx(best / len(worth))


@given(chances, steps)
def test_what_is_worth_less_than_the_least_is_never_taken(some, slopes):
    worth, seconds = [survival(one) for one in some], list(accumulate(slopes, initial=1.0))
    least = least_worth(len(worth), seconds)
    enough = [[value for value in one if value >= least] for one in worth]
    assert best_lengths(enough, seconds) == best_lengths(worth, seconds)


@pytest.mark.parametrize(("acceptance", "cost"), [(0.5, 0.1), (0.8, 0.05), (0.8, 0.3), (0.95, 0.2), (0.3, 0.5)])
def test_one_sequence_against_the_closed_form(acceptance, cost):
    """(1 - a^(k+1)) / (1 - a) tokens for 1 + c k (Leviathan et al., 2022)."""
    speeds = [(1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + cost * k) for k in range(9)]
    found = best_lengths([survival([acceptance] * 8)], [1 + cost * k for k in range(9)])
    assert found.drafts == [speeds.index(max(speeds))]
    assert found.speedup == pytest.approx(max(speeds))


def test_a_round_of_drafting_is_paid_once_for_all():
    """One draft of four that are kept by 0.9: 7.6 tokens in 1 + 0.4 + 0.3 steps; for one alone 4.9 in 1.4 steps."""
    seconds = [1 + 0.1 * drafts for drafts in range(9)]
    together = best_lengths([[0.9]] * 4, seconds, round_time=0.3)
    assert together.drafts == [1] * 4
    assert together.speedup == pytest.approx(7.6 / 4 / 1.7)
    assert best_lengths([[0.9], [], [], []], seconds, round_time=0.3).drafts == [0] * 4


def test_what_it_takes_to_draft_at_all_may_be_too_much():
    seconds = [1 + 0.1 * drafts for drafts in range(9)]
    assert best_lengths([[0.9]] * 4, seconds, any_time=0.4).drafts == [1] * 4
    assert best_lengths([[0.9]] * 4, seconds, any_time=0.6) == ([0] * 4, 1.0)


def test_sure_drafts_go_before_unsure_ones():
    """A row costs a twelfth of a step of four: what is kept by less than 0.4 or so is left out."""
    worth = [survival([0.95] * 4), survival([0.5] * 4), survival([0.2] * 4), []]
    assert best_lengths(worth, [1 + drafts / 12 for drafts in range(13)]).drafts == [4, 1, 0, 0]
