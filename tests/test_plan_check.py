"""The validator behind every scheduler: item by item it refuses what breaks a rule, and gives back the KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import Table, view_of

from pluglm.kernel.core import PlanItem, StepPlan

GOOD = PlanItem(0, 1)
REASONS: dict[str, tuple[PlanItem, str]] = {
    "unknown": (PlanItem(99, 1), "sequence 99 is unknown, preempted in this plan or listed twice"),
    "twice": (PlanItem(0, 1), "sequence 0 is unknown, preempted in this plan or listed twice"),
    "no tokens": (PlanItem(1, 0), "sequence 1 asks for 0 tokens, 1 to 4 are pending"),
    "negative": (PlanItem(1, -2), "sequence 1 asks for -2 tokens, 1 to 4 are pending"),
    "more than pending": (PlanItem(1, 5), "sequence 1 asks for 5 tokens, 1 to 4 are pending"),
    "half": (PlanItem(1, 1.5), "sequence 1 asks for 1.5 tokens, 1 to 4 are pending"),  # type: ignore[arg-type]
    "words": (PlanItem(1, "2"), "sequence 1 asks for 2 tokens, 1 to 4 are pending"),  # type: ignore[arg-type]
    "budget": (PlanItem(2, 20), "sequence 2 exceeds the budget of 20 tokens"),
    "seats": (PlanItem(2, 5), "sequence 2 exceeds the 2 seats"),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_of_the_validator_and_the_good_item_stays(name: str) -> None:
    item, reason = REASONS[name]
    table = Table([view_of(0, 5, 4), view_of(1, 8, 4)], [view_of(2, 30)], tokens=20, seats=2)
    table.transaction.extend(0, 5)
    if item.sequence_id == 2:
        table.transaction.acquire(2)
        table.transaction.extend(2, item.num_tokens)
    if item.sequence_id == 1:
        table.transaction.extend(1, 8)
    plan, reasons = table.check(StepPlan((GOOD, item)))
    assert (plan, reasons) == (StepPlan((GOOD,)), [reason])
    assert (table.blocks(0), table.blocks(1), table.blocks(2)) == (2, 1, None)


def test_a_sequence_that_the_plan_preempts_may_not_run_in_it() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 8, 4)], [])
    table.transaction.extend(0, 5)
    table.transaction.release(1)
    plan, reasons = table.check(StepPlan((GOOD, PlanItem(1, 4)), (1, 1)))
    assert plan == StepPlan((GOOD,), (1,))
    assert reasons == ["sequence 1 is unknown, preempted in this plan or listed twice"]
    assert (table.blocks(0), table.blocks(1)) == (2, None)


@pytest.mark.parametrize("released", [True, False])
def test_a_preempted_sequence_keeps_no_kv(released: bool) -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 8, 4)], [])
    if released:
        table.transaction.release(1)
    assert table.check(StepPlan((), (1,))) == (StepPlan((), (1,)), [])
    assert (table.blocks(0), table.blocks(1)) == (1, None)


def test_what_does_not_run_cannot_be_preempted() -> None:
    table = Table([view_of(0, 5, 4)], [view_of(2, 3)])
    plan, reasons = table.check(StepPlan((), (2, 77)))
    assert plan == StepPlan()
    assert reasons == ["cannot preempt 2: it is not running", "cannot preempt 77: it is not running"]


def test_a_seat_that_preemption_frees_may_be_taken_in_the_same_plan() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3)], seats=2)
    table.transaction.release(1)
    table.transaction.acquire(2)
    table.transaction.extend(2, 3)
    plan, reasons = table.check(StepPlan((PlanItem(2, 3),), (1,)))
    assert (plan, reasons) == (StepPlan((PlanItem(2, 3),), (1,)), [])


@given(
    wanted=st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 9)), max_size=8),
    preempted=st.lists(st.integers(-1, 6), max_size=4),
    tokens=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_the_validator_never_lets_a_broken_plan_through(
    wanted: list[tuple[int, int]], preempted: list[int], tokens: int
) -> None:
    """Garbage in: no exception, sound books, and what is left respects every rule."""
    running = [view_of(0, 5, 4), view_of(1, 8, 4), view_of(2, 5, 4, drafts=3)]
    table = Table(running, [view_of(3, 6), view_of(4, 2)], tokens=tokens, seats=4)
    plan, reasons = table.check(StepPlan(tuple(PlanItem(*pair) for pair in wanted), tuple(preempted)))
    pending = {one.sequence_id: one.num_pending for one in (*running, *table.view.waiting)}
    ids = [item.sequence_id for item in plan.items]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(plan.preempted)
    assert set(plan.preempted) <= {0, 1, 2}
    assert all(1 <= item.num_tokens <= pending[item.sequence_id] for item in plan.items)
    assert sum(item.num_tokens for item in plan.items) <= tokens
    assert 3 - len(plan.preempted) + sum(i > 2 for i in ids) <= 4
    assert len(reasons) == len(wanted) - len(ids) + sum(one not in (0, 1, 2) for one in set(preempted))
