"""The oracle of the random traces sees what it is for: for every invariant, a planted bug breaks it and is named."""

from __future__ import annotations

import pytest
from replay import main
from trace_bugs import BUGS, Bug, drafts_are_taken_unseen, nobody_is_let_in, shared_block_is_not_copied
from trace_case import Trace, from_json, to_json
from trace_choices import pairs
from trace_generate import make_trace
from trace_oracle import INVARIANTS, check_trace, run_trace
from trace_parts import build_rig
from trace_play import ViolationError
from trace_shrink import same_failure, shrink
from trace_watch_ends import PreemptionAlarm

NUM_TRACES, SEED = 200, 1


def among(bug: Bug) -> tuple[tuple[str, str], ...]:
    """The pairs of scheduler and manager that the bug shows with."""
    return tuple(
        (policy, kv)
        for policy, kv in pairs()
        if (not bug.policies or policy in bug.policies) and (not bug.kvs or kv in bug.kvs)
    )


def first_failure(bug: Bug) -> tuple[Trace, ViolationError]:
    chosen, twice = among(bug), bug.invariant == "I13"
    for index in range(NUM_TRACES):
        trace = make_trace(index, SEED, chosen)
        if (violation := check_trace(trace, twice=twice).violation) is not None:
            return trace, violation
    raise AssertionError(f"{bug} was not seen in {NUM_TRACES} traces")


def test_every_invariant_has_a_planted_bug() -> None:
    assert {bug.invariant for bug in BUGS} == {*INVARIANTS}


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_breaks_its_invariant(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    assert first_failure(bug)[1].invariant == bug.invariant


@pytest.mark.parametrize("plant", [shared_block_is_not_copied, nobody_is_let_in, drafts_are_taken_unseen])
def test_a_failure_shrinks_to_a_small_trace_that_replays(
    plant: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = next(one for one in BUGS if one.plant is plant)
    with monkeypatch.context() as patch:
        bug.plant(patch)
        trace, violation = first_failure(bug)
        small = shrink(trace, same_failure(violation))
        again = from_json(to_json(small))
        assert again == small
        assert len(small.arrivals) <= 2
        assert max(len(one.prompt) for one in small.arrivals) <= 3
        assert not small.cancels
        assert len(to_json(small)) < 500
        assert main([to_json(small)]) == 1
        assert f": {bug.invariant}: " in capsys.readouterr().out
    assert main([to_json(small)]) == 0  # without the bug it passes
    assert "no violation" in capsys.readouterr().out


def test_more_preemptions_than_anybody_can_have_needed_raise_the_alarm() -> None:
    trace = make_trace(0, SEED, (("fcfs", "paged"),))
    rig = build_rig(trace)
    rig.core.add(trace.arrivals[0].name, (1,), trace.arrivals[0].params())
    alarm = PreemptionAlarm(trace, rig, run_trace(trace).counts)
    (lane,) = rig.core.roster.live()
    alarm._lanes[lane.sequence_id] = lane
    alarm.drained()
    lane.num_preemptions = 1
    with pytest.raises(ViolationError, match="preempted 1 times, 0 could be needed"):
        alarm.drained()
