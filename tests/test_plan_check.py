"""The validator behind every scheduler: item by item it refuses what breaks a rule, and gives back the KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import Table, view_of

from pluglm.kernel.core import PlanItem, StepPlan

GOOD = PlanItem(0, 1)
REASONS: dict[str, tuple[PlanItem, str]] = {
    "unknown": (PlanItem(99, 1), "sequence 99 is unknown, leaves in this plan or is listed twice"),
    "twice": (PlanItem(0, 1), "sequence 0 is unknown, leaves in this plan or is listed twice"),
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
    assert reasons == ["sequence 1 is unknown, leaves in this plan or is listed twice"]
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


@pytest.mark.parametrize(("field", "what"), [("preempted", "preempt"), ("offloaded", "offload"), ("paused", "pause")])
def test_only_those_that_run_can_lose_a_seat(field: str, what: str) -> None:
    table = Table([view_of(0, 5, 4)], [view_of(2, 3)])
    plan, reasons = table.check(StepPlan(**{field: (2, 77)}))
    assert plan == StepPlan()
    assert reasons == [f"cannot {what} {one}: it is not running" for one in (2, 77)]


def test_one_that_waits_with_kv_can_lose_it_and_nothing_else() -> None:
    waiting = view_of(1, 5, 4, holds_kv=True)
    for field, what in (("offloaded", "offload"), ("paused", "pause")):
        plan, reasons = Table([], [waiting]).check(StepPlan(**{field: (1,)}))
        assert (plan, reasons) == (StepPlan(), [f"cannot {what} 1: it is not running"])
    table = Table([], [waiting])
    assert table.check(StepPlan(preempted=(1,))) == (StepPlan(preempted=(1,)), [])
    assert table.blocks(1) is None


def test_nobody_loses_its_seat_twice() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [])
    plan, reasons = table.check(StepPlan(preempted=(0,), offloaded=(0, 1), paused=(1,), refused=((1, "full"),)))
    assert plan == StepPlan(preempted=(0,), offloaded=(1,))
    assert reasons == [
        "cannot offload 0: it is not running",
        "cannot pause 1: it is not running",
        "cannot refuse 1: it is unknown, or loses its seat in this plan",
    ]
    assert (table.blocks(0), table.blocks(1)) == (None, None)


def test_a_paused_one_keeps_exactly_what_it_has_computed() -> None:
    table = Table([view_of(0, 9, 4)], [])
    table.transaction.extend(0, 9)
    assert table.check(StepPlan(paused=(0,))) == (StepPlan(paused=(0,)), [])
    assert table.blocks(0) == 1


def test_whoever_is_refused_gives_its_kv_back_and_runs_no_more() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3)])
    table.transaction.extend(0, 5)
    plan, reasons = table.check(StepPlan((GOOD, PlanItem(1, 1)), refused=((1, "full"), (2, "late"), (77, "who"))))
    assert plan == StepPlan((GOOD,), refused=((1, "full"), (2, "late")))
    assert reasons == [
        "cannot refuse 77: it is unknown, or loses its seat in this plan",
        "sequence 1 is unknown, leaves in this plan or is listed twice",
    ]
    assert (table.blocks(0), table.blocks(1)) == (2, None)


def test_seats_of_those_that_end_or_pause_are_free_at_once() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3), view_of(3, 3)], seats=2)
    for one in (2, 3):
        table.transaction.acquire(one)
        table.transaction.extend(one, 3)
    wanted = StepPlan((PlanItem(2, 3), PlanItem(3, 3)), paused=(0,), refused=((1, "full"),))
    assert table.check(wanted) == (wanted, [])


def test_kv_that_is_acquired_and_not_used_goes_back() -> None:
    """Adopted blocks too: they would be held by one that does not run."""
    table = Table([], [view_of(0, 9), view_of(1, 9)], num_adopted=8)
    for one in table.view.waiting:
        table.transaction.acquire(one.sequence_id, one.cache_key)
        table.transaction.extend(one.sequence_id, 9)
    assert table.check(StepPlan((PlanItem(0, 1),))) == (StepPlan((PlanItem(0, 1),)), [])
    assert (table.blocks(0), table.blocks(1)) == (3, None)


def test_adopted_tokens_are_not_pending() -> None:
    table = Table([], [view_of(0, 9)], num_adopted=8)
    table.transaction.acquire(0, table.view.waiting[0].cache_key)
    table.transaction.extend(0, 9)
    plan, reasons = table.check(StepPlan((PlanItem(0, 2),)))
    assert (plan, reasons) == (StepPlan(), ["sequence 0 asks for 2 tokens, 1 to 1 are pending"])
    assert table.blocks(0) is None


def test_a_refused_item_of_one_that_waits_with_kv_leaves_it_what_it_has_computed() -> None:
    table = Table([], [view_of(0, 9, 4, holds_kv=True)])
    table.transaction.extend(0, 9)
    plan, reasons = table.check(StepPlan((PlanItem(0, 6),)))
    assert (plan, reasons) == (StepPlan(), ["sequence 0 asks for 6 tokens, 1 to 5 are pending"])
    assert table.blocks(0) == 1
