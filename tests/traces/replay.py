"""Replays one trace: `python tests/traces/replay.py TRACE`, where TRACE is a file, the JSON line itself or - for stdin.

Prints what each step decided and the first invariant that does not hold; exits 1 when there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trace_case import Trace, from_json
from trace_oracle import check_trace
from trace_play import Outcome


def read(argument: str) -> Trace:
    """The trace of a command-line argument."""
    if argument == "-":
        return from_json(sys.stdin.read())
    return from_json(argument if argument.lstrip().startswith("{") else Path(argument).read_text(encoding="utf-8"))


def show(outcome: Outcome) -> None:
    """Steps that did nothing are left out."""
    for step, plan, tables, events in outcome.log:
        parts = []
        if plan is not None:
            parts += [f"{one.sequence_id}:{one.num_tokens}" for one in plan.items]
            for word in ("preempted", "offloaded", "paused", "refused"):
                parts += [f"{word} {getattr(plan, word)}"] if getattr(plan, word) else []
        if parts or events:
            print(f"step {step}: {' '.join(parts)}")
        for sequence_id, table in tables:
            print(f"    sequence {sequence_id} in blocks {table}")
        for event in events:
            print(f"    request {event[0]}, lane {event[1]}: tokens {event[2]} {event[3] or ''}")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    outcome = check_trace(read(arguments[0]), twice=True)
    show(outcome)
    if outcome.violation is None:
        print("no violation")
        return 0
    print(f"violation at step {outcome.step}: {outcome.violation}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
