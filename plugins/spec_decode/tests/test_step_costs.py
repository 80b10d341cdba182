"""Measured step costs against the costs that the measurements were made from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.step_costs import (
    ASSUMED_COST,
    FRESH_STEPS,
    MIN_SAMPLES,
    PLAIN_EVERY,
    SAMPLES,
    FixedCosts,
    MeasuredCosts,
)


def measured(num_sequences: int, seconds: dict[int, float], times: int = MIN_SAMPLES) -> MeasuredCosts:
    """seconds: of a step with so many drafts a sequence."""
    costs = MeasuredCosts()
    for drafts, one in seconds.items():
        for _ in range(times):
            costs.note(num_sequences, drafts * num_sequences, one)
    return costs


def ratio(costs: MeasuredCosts, num_sequences: int, drafts: int) -> float:
    """Of a step with so many drafts a sequence, over one without."""
    times = costs.times(num_sequences, drafts * num_sequences)
    return times[drafts * num_sequences] / times[0]


def test_fixed():
    assert FixedCosts(0.25).times(1, 4) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert FixedCosts(0.25).times(8, 8)[8] == 1.25


@given(st.floats(1e-4, 10), st.floats(0, 1), st.integers(1, 64))
def test_a_straight_line_is_found_from_two_points(plain_s, draft_cost, num_sequences):
    seconds = {drafts: plain_s * (1 + draft_cost * drafts) for drafts in (0, 3)}
    costs = measured(num_sequences, seconds)
    for drafts in range(9):
        assert ratio(costs, num_sequences, drafts) == pytest.approx(1 + draft_cost * drafts)


def test_a_cliff_is_seen():
    costs = measured(8, {0: 0.02, 4: 0.03, 8: 0.8})
    assert ratio(costs, 8, 4) == pytest.approx(1.5)
    assert ratio(costs, 8, 8) == pytest.approx(40)
    assert ratio(costs, 8, 6) == pytest.approx((1.5 + 40) / 2)


def test_single_long_steps_do_not_count():
    """A step in which a long prompt was computed too."""
    costs = measured(1, {0: 0.02, 2: 0.03}, times=5)
    for drafts in (0, 2):
        costs.note(1, drafts, 9.0)
        costs.note(1, drafts, 7.0)
    assert ratio(costs, 1, 2) == pytest.approx(1.5)


def test_drafts_never_seem_to_save_time():
    assert ratio(measured(1, {0: 0.02, 2: 0.01}), 1, 2) == 1


def test_nothing_is_believed_of_a_few_samples():
    costs = measured(1, {0: 0.02, 2: 0.9}, times=MIN_SAMPLES - 1)
    assert ratio(costs, 1, 2) == pytest.approx(1 + 2 * ASSUMED_COST)
    costs.note(1, 2, 0.9)
    assert ratio(costs, 1, 2) == pytest.approx(1 + 2 * ASSUMED_COST)  # plain steps are still not known
    costs.note(1, 0, 0.02)
    assert ratio(costs, 1, 2) == pytest.approx(45)


def test_an_unknown_size_takes_the_nearest():
    costs = measured(8, {0: 0.02, 2: 0.04})
    for drafts in (0, 2):
        for _ in range(MIN_SAMPLES):
            costs.note(1, drafts, 0.02 + 0.001 * drafts)
    assert ratio(costs, 1, 2) == pytest.approx(1.1)
    assert ratio(costs, 2, 2) == pytest.approx(1.1)
    assert ratio(costs, 8, 2) == pytest.approx(2)
    assert ratio(costs, 64, 2) == pytest.approx(2)
    assert ratio(costs, 7, 2) == pytest.approx(2, rel=0.1)


def test_plain_steps_are_asked_for_when_needed():
    costs = MeasuredCosts()
    assert not costs.wants_plain(4)  # before drafts are known to be made at all
    for _ in range(MIN_SAMPLES):
        costs.note(4, 8, 0.03)
    for _ in range(MIN_SAMPLES):
        assert costs.wants_plain(4)
        assert not costs.wants_plain(32)
        costs.note(4, 0, 0.02)
    asked = 0
    for _ in range(10 * PLAIN_EVERY):
        asked += (is_plain := costs.wants_plain(4))
        costs.note(4, 0 if is_plain else 8, 0.03)
    assert 9 <= asked <= 10


def test_what_is_old_is_forgotten_and_the_rest_follows():
    costs = measured(1, {0: 0.02, 2: 0.03, 8: 0.9})
    generator = random.Random(5)
    for _ in range(FRESH_STEPS + 1):
        drafts = generator.choice((0, 2))
        costs.note(1, drafts, 0.02 if drafts == 0 else 0.024)
    assert ratio(costs, 1, 2) == pytest.approx(1.2)
    assert ratio(costs, 1, 8) == pytest.approx(1.8)  # the line through what is known now


def test_a_few_drafts_in_a_large_batch_tell_what_many_cost():
    costs = measured(8, {0: 0.02})
    for _ in range(MIN_SAMPLES):
        costs.note(8, 2, 0.03)  # two drafts in all cost half a step
    assert costs.times(8, 8)[2] / costs.times(8, 8)[0] == pytest.approx(1.5)
    assert ratio(costs, 8, 1) == pytest.approx(1.5 + 6 / 8)  # none of the others is dearer than a row of a plain step


def test_a_machine_that_is_slow_for_a_while_leaves_no_trace():
    """For forty steps at a time everything takes up to twice as long."""
    costs, generator = MeasuredCosts(), random.Random(4)
    for stretch in range(60):
        slowness, drafts = generator.uniform(1, 2), (0, 8)[stretch % 2]
        for step in range(40):
            of = (0, 8)[step % 20 == 0] if drafts == 0 else (8, 0)[step % 20 == 0]
            costs.note(8, of, slowness * (0.02 if of == 0 else 0.03))
    assert ratio(costs, 8, 1) == pytest.approx(1.5, rel=0.1)


def test_the_pace_is_that_of_now():
    costs = measured(4, {0: 0.02, 2: 0.03}, times=SAMPLES)
    for _ in range(2 * SAMPLES):
        costs.note(4, 0, 0.06)
    assert costs.times(4, 8)[0] * costs.pace == pytest.approx(0.06)
    assert costs.times(4, 8)[8] * costs.pace == pytest.approx(0.09)


def test_times_never_fall():
    costs = measured(8, {0: 0.02, 1: 0.03, 2: 0.028, 4: 0.04})
    times = costs.times(8, 64)
    assert times == sorted(times)
    assert ratio(costs, 8, 4) == pytest.approx(2)
