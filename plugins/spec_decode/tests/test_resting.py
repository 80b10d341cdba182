"""Steps that a drafter is not asked about: when they begin, how many they are, and what ends them."""

from __future__ import annotations

from pluglm_spec_decode.resting import MIN_IDLE, STEPS, Resting


def idle(resting: Resting, num_steps: int, ids: list[int]) -> list[tuple[int, int]]:
    """The steps with a decision, and of how many steps the rest before it was."""
    found = []
    for step in range(num_steps):
        if not resting.spares(list(ids)):
            found.append((step, resting.num_rested))
            resting.decided(ids, is_idle=True)
        for _ in ids:
            resting.observed()
    return found


def test_it_rests_after_some_decisions_against_drafts_and_decides_again_behind_it() -> None:
    steps = idle(Resting(), MIN_IDLE + 3 * (1 + STEPS), [4, 5])
    last = MIN_IDLE - 1
    assert steps[: last + 1] == [(step, 0) for step in range(last + 1)]
    assert steps[last + 1 :] == [(last + number * (1 + STEPS), STEPS) for number in (1, 2, 3)]


def test_a_draft_ends_it_and_other_sequences_are_decided_about_once() -> None:
    resting = Resting()
    idle(resting, MIN_IDLE, [4])
    assert resting.spares([4])
    resting.observed()
    assert not resting.spares([4, 5])
    resting.decided([4, 5], is_idle=True)
    resting.observed()
    assert resting.spares([4, 5])
    resting.observed()
    assert not resting.spares([4])
    resting.decided([4], is_idle=False)
    resting.observed()
    assert [step for step, _ in idle(resting, MIN_IDLE + 1, [4])] == list(range(MIN_IDLE))


def test_a_step_that_is_asked_about_twice_counts_once() -> None:
    """It had no outcome: it failed, or was interrupted."""
    resting = Resting()
    idle(resting, MIN_IDLE, [4])
    for number in range(STEPS):
        assert resting.spares([4])
        assert resting.spares([4])
        assert resting.num_rested == number + 1
        resting.observed()
    assert not resting.spares([4])
    resting.decided([4], is_idle=True)
    assert not resting.spares([4])  # the step of a decision, once more
    assert not Resting().spares([])
