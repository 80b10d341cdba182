"""Steps that are planned ahead are those that are planned in time: one trace, both ways, and every decision the same.

The reference is the engine without it, which test_trace_suite.py holds to the invariants and to tokens in closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from trace_case import Trace
from trace_choices import managers, schedulers
from trace_generate import make_trace
from trace_oracle import run_trace
from trace_parts import build_rig
from trace_policies import ChaosPolicy

from pluglm.ahead.kv import AheadKV
from pluglm.ahead.planning import AheadPlanning

SEED, EACH = 11, 8
CAN = sorted(name for name, one in schedulers().items() if isinstance(one.cls, type) and hasattr(one.cls, "checkpoint"))
PAIRS = [(policy, kv) for policy in CAN for kv in sorted(managers())]


def compare(trace: Trace) -> tuple[str | None, Counter[str]]:
    """What went otherwise with plans ahead, or None; and how many of those stood."""
    rig = build_rig(trace, is_ahead=True)
    ahead, plain = run_trace(trace, rig), run_trace(trace)
    planning: Any = rig.core._planning
    counts = Counter(kept=planning.kept, dropped=planning.dropped)
    for name, outcome in (("plain", plain), ("ahead", ahead)):
        if outcome.violation is not None:
            return f"{name}: {outcome.violation}", counts
    if ahead.log != plain.log:
        steps = enumerate(zip(ahead.log, plain.log, strict=False))
        return f"differs at {next((i for i, (a, b) in steps if a != b), 'the end')}", counts
    return None if ahead.tokens == plain.tokens else "other tokens", counts


def quiet(trace: Trace) -> Trace:
    """Long outputs and nothing in the way, so that most steps come as they were foreseen."""
    arrivals = tuple(replace(one, n=1, search=None, deadline_s=None, ignore_eos=True) for one in trace.arrivals)
    return replace(
        trace, arrivals=arrivals, cancels=(), resets=(), faults=(), holds=(), drafts=0, search=None, tier=None
    )


@pytest.mark.parametrize(("policy", "kv"), PAIRS, ids=lambda one: one)
def test_every_plan_and_token_is_the_same(policy: str, kv: str) -> None:
    """With preemption, prefix hits, cancels, deadlines, lanes, searches, drafts, tiers and faults of the backend."""
    total: Counter[str] = Counter()
    for index in range(EACH):
        trace = make_trace(index, SEED, ((policy, kv),))
        for one in (trace, quiet(trace)):
            difference, counts = compare(one)
            assert difference is None, (index, difference)
            total += counts
    assert total["kept"] > 0
    assert total["dropped"] > 0


def test_those_that_may_be_asked_ahead_are_those_that_say_so() -> None:
    assert {"fcfs", "priority", "shortest_first", "static_batch"} <= {*CAN}
    assert not {"deadline", "fair", "mlfq", "prefix_first"} & {*CAN}  # they go by the clock, by events or by the cache


def a_plan_stands_that_did_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AheadPlanning, "_came", lambda self, view, step_index: True)


def what_was_asked_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChaosPolicy, "checkpoint", lambda self: tuple)


def the_kv_changes_beside_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A transaction that another one does not end is still open when the plan is made, and is committed over it."""
    patch.setattr(AheadKV, "_end", lambda self: None)


@pytest.mark.parametrize(
    "plant", [a_plan_stands_that_did_not_come, what_was_asked_is_not_taken_back, the_kv_changes_beside_a_plan]
)
def test_the_comparison_sees_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(compare(make_trace(index, SEED, (("test:chaos", "paged"),)))[0] for index in range(40))
