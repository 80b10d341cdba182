"""All watchers of a trace together, and the comparison of two runs of it (I13)."""

from __future__ import annotations

from collections.abc import Sequence

from trace_case import Trace
from trace_parts import Rig
from trace_play import Frame, Outcome, ViolationError, Watcher, play
from trace_watch_ends import EndsWatch, PreemptionAlarm
from trace_watch_memory import MemoryWatch
from trace_watch_order import OrderWatch
from trace_watch_plan import PlanWatch, ProgressWatch

INVARIANTS = tuple(f"I{number}" for number in range(1, 14))


class DecisionLog(Watcher):
    """Every plan, every event and every block table, in plain values."""

    def __init__(self, rig: Rig, outcome: Outcome) -> None:
        self._core, self._outcome = rig.core, outcome

    def after_step(self, frame: Frame) -> None:
        events = [(one.request_id, one.lane, one.token_ids, one.finish_reason) for one in frame.events]
        parts = [part for inputs in frame.batches for part in inputs.groups or (inputs,)]
        tables = [(one.sequence_id, one.block_table) for part in parts for one in part.segments]
        self._outcome.log.append((frame.step, frame.plan, tables, events))


def run_trace(trace: Trace, rig: Rig | None = None) -> Outcome:
    """One run with every watcher. Their order matters where one fault breaks several invariants: causes come first."""
    found = Outcome()
    made: list[Watcher] = []

    def watchers(trace: Trace, rig: Rig) -> Sequence[Watcher]:
        ends = EndsWatch(trace, rig, found.counts)
        alarm = PreemptionAlarm(trace, rig, found.counts)
        made.extend((ends, alarm))
        plan, progress = PlanWatch(trace, rig, found.counts), ProgressWatch(trace, rig)
        memory, order = MemoryWatch(trace, rig, found.counts), OrderWatch(trace, rig)
        return [DecisionLog(rig, found), plan, memory, ends, order, progress, alarm]

    outcome = play(trace, watchers, rig)
    outcome.counts, outcome.log = found.counts, found.log
    for watcher in made:
        if isinstance(watcher, PreemptionAlarm):
            outcome.most_preemptions = watcher.most
        elif isinstance(watcher, EndsWatch):
            outcome.tokens = {
                name: [record.tokens[lane] for lane in sorted(record.tokens)]
                for name, record in watcher.records.items()
            }
    return outcome


def check_trace(trace: Trace, twice: bool = False) -> Outcome:
    """run_trace; `twice`: it is run again, and every decision must be the same."""
    outcome = run_trace(trace)
    if twice and outcome.violation is None:
        again = run_trace(trace)
        if again.log != outcome.log:
            step = next((i for i, (a, b) in enumerate(zip(outcome.log, again.log, strict=False)) if a != b), "the last")
            outcome.violation = ViolationError("I13", f"two runs differ at step {step}")
    return outcome
