"""Steps that a drafter is not asked about: when they begin, how many they are, and what ends them."""

from __future__ import annotations

from pluglm_spec_decode.resting import MIN_IDLE, STEPS, Resting


def test_it_rests_after_some_decisions_against_drafts_and_decides_again_behind_it() -> None:
    resting = Resting()
    steps = []
    for step in range(MIN_IDLE + 3 * (1 + STEPS)):
        if not resting.goes_on([4, 5]):
            steps.append((step, resting.num_rested))
            resting.decided([4, 5], is_idle=True)
        for sequence_id in (4, 5):
            resting.observed(sequence_id)
    first = MIN_IDLE - 1
    assert steps[: first + 1] == [(step, 0) for step in range(first + 1)]
    assert steps[first + 1 :] == [(first + number * (1 + STEPS), STEPS) for number in (1, 2, 3)]


def test_a_draft_ends_it_and_other_sequences_are_decided_about_once() -> None:
    resting = Resting()
    for _ in range(MIN_IDLE):
        resting.decided([4], is_idle=True)
    assert resting.goes_on([4])
    assert resting.goes_on([4])  # asked twice for one step
    assert not resting.goes_on([4, 5])
    assert not resting.goes_on([4])
    resting.decided([4, 5], is_idle=True)
    assert resting.goes_on([4, 5])
    resting.decided([4], is_idle=False)
    for _ in range(MIN_IDLE - 1):
        resting.decided([4], is_idle=True)
    assert not resting.goes_on([4])
    assert not Resting().goes_on([])
