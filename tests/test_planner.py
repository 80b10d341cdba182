"""The kernel's planner and the validator behind every scheduler, over the paged KV books and plain views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.core import Budget, Event, PlanItem, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.scheduler import Accept, Need, Skip, Stop, Victims
from pluglm.kernel.memory import StepKV
from pluglm.kernel.plan_check import refuse_bad_items
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kv.manager import BlockManager

BLOCK = 4


def view_of(sequence_id: int, known: int = 1, computed: int = 0, drafts: int = 0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id,
        request_id=f"r{sequence_id}",
        tenant="",
        priority=0,
        arrival_s=float(sequence_id),
        num_prompt=known,
        num_known=known,
        num_computed=computed,
        num_drafts=drafts,
        num_output=0,
        max_new_tokens=8,
        num_preemptions=0,
    )


class Policy:
    """Arrival order, everything that is left, and a fixed answer when blocked."""

    def __init__(self, blocked: Any = None, share: int | None = None) -> None:
        self.blocked, self.limit = blocked or Stop(), share
        self.asked: list[tuple[int, Need]] = []

    def admit(self, request: RequestView, num_waiting: int) -> Accept:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return [one.sequence_id for one in view.running]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [one.sequence_id for one in view.waiting]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left if self.limit is None else self.limit

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        self.asked.append((request.sequence_id, need))
        return self.blocked  # type: ignore[no-any-return]

    def on_event(self, event: Event) -> None: ...


class Table:
    """A pool in which every running sequence holds its computed tokens, and one planned step over it."""

    def __init__(
        self,
        running: list[RequestView],
        waiting: list[RequestView],
        *,
        blocks: int = 100,
        tokens: int = 100,
        seats: int = 10,
    ) -> None:
        self.kv = BlockManager(KVLayout(num_blocks=blocks, block_size=BLOCK), blocks)
        budget = Budget(num_tokens=tokens, num_seats=seats)
        running = [replace(one, holds_kv=True) for one in running]
        self.view = StepView(step=0, now_s=0.0, budget=budget, running=tuple(running), waiting=tuple(waiting))
        setup = self.kv.transaction()
        for one in running:
            setup.acquire(one.sequence_id)
            setup.extend(one.sequence_id, one.num_computed)
        setup.commit()
        self.transaction = StepKV(self.kv.transaction(), "kv 'paged'")

    def plan(self, policy: Any) -> StepPlan:
        plan = PolicyScheduler(policy).plan(self.view, self.view.budget, self.transaction)
        kept, reasons = refuse_bad_items(plan, self.view, self.transaction, self.transaction.adopted)
        assert (kept, reasons) == (plan, [])
        self.commit()
        return plan

    def refuse(self, *items: PlanItem, preempted: tuple[int, ...] = ()) -> tuple[StepPlan, list[str]]:
        answer = refuse_bad_items(StepPlan(items, preempted), self.view, self.transaction, self.transaction.adopted)
        self.commit()
        return answer

    def commit(self) -> None:
        self.transaction.commit()
        self.kv.audit()

    def blocks(self, sequence_id: int) -> int | None:
        try:
            return len(self.kv.block_table(sequence_id))
        except KeyError:
            return None


def items(plan: StepPlan) -> list[tuple[int, int]]:
    return [(item.sequence_id, item.num_tokens) for item in plan.items]


def test_decode_comes_before_prefill_and_a_long_prompt_gets_the_rest_in_chunks() -> None:
    table = Table([view_of(0, 9, 8), view_of(1, 30, 10), view_of(2, 5, 4)], [view_of(3, 50)], tokens=40)
    assert items(table.plan(Policy())) == [(0, 1), (1, 20), (2, 1), (3, 18)]
    assert [table.blocks(i) for i in range(4)] == [3, 8, 2, 13]  # a new one holds room for all it knows


def test_the_last_chunk_ends_the_budget_and_nobody_behind_gets_any() -> None:
    table = Table([view_of(0, 30, 10)], [view_of(1, 5)], tokens=7)
    assert items(table.plan(Policy())) == [(0, 7)]
    assert table.blocks(1) is None


def test_seats_bound_admission() -> None:
    table = Table([view_of(0, 2, 1)], [view_of(i, 3) for i in (1, 2, 3)], seats=3)
    policy = Policy()
    assert items(table.plan(policy)) == [(0, 1), (1, 3), (2, 3)]
    assert policy.asked == [(3, "seat"), (3, "seat")]


@pytest.mark.parametrize(("answer", "expected"), [(Stop(), [(0, 1)]), (Skip(), [(0, 1), (2, 3)])])
def test_a_blocked_waiting_request_stops_or_lets_others_by(answer: Any, expected: list[tuple[int, int]]) -> None:
    table = Table([view_of(0, 2, 1)], [view_of(1, 40), view_of(2, 3)], blocks=3)
    assert items(table.plan(Policy(answer))) == expected
    assert table.blocks(1) is None


@pytest.mark.parametrize("wanted", [0, -3])
def test_a_share_of_nothing_skips_the_request(wanted: int) -> None:
    assert items(Table([view_of(0, 2, 1)], [view_of(1, 3)]).plan(Policy(share=wanted))) == []


def test_a_share_is_clipped_to_what_is_pending_and_left() -> None:
    assert items(Table([view_of(0, 2, 1)], [view_of(1, 30)], tokens=9).plan(Policy(share=500))) == [(0, 1), (1, 8)]


def test_victims_fall_in_the_order_given_and_only_as_far_as_needed() -> None:
    """Sequence 0 takes the free block; 1 finds none, and 2 falls before 0 would."""
    running = [view_of(0, 9, 8), view_of(1, 5, 4), view_of(2, 5, 4)]
    table = Table(running, [view_of(3, 2)], blocks=5)
    plan = table.plan(Policy(Victims((1, 2, 0))))
    assert (items(plan), plan.preempted) == ([(0, 1), (1, 1)], (2,))
    assert [table.blocks(i) for i in range(4)] == [3, 2, None, None]


def test_nobody_is_admitted_in_a_step_that_preempted_for_kv() -> None:
    """The room that the victim left would do for sequence 3; it belongs to those that run."""
    running = [view_of(0, 5, 4), view_of(1, 13, 12)]
    table = Table(running, [view_of(3, 2)], blocks=4)
    plan = table.plan(Policy(Victims((1,))))
    assert (items(plan), plan.preempted) == ([(0, 1)], (1,))
    assert table.blocks(3) is None


def test_a_victim_served_before_gives_its_tokens_back() -> None:
    """Sequence 0 is served 4 of 6 tokens, then falls to 1, which was promised 2: 4 are left for 2."""
    table = Table([view_of(0, 8, 4), view_of(1, 9, 4), view_of(2, 9, 4)], [], blocks=4, tokens=6)
    plan = table.plan(Policy(Victims((0,))))
    assert (items(plan), plan.preempted) == ([(1, 2), (2, 4)], (0,))


def test_one_that_finds_no_victim_steps_back_itself_unless_it_is_alone() -> None:
    together = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [], blocks=2)
    plan = together.plan(Policy(Stop()))
    assert (items(plan), plan.preempted) == ([(1, 1)], (0,))
    alone = Table([view_of(0, 5, 4)], [], blocks=1)
    assert alone.plan(Policy(Stop())) == StepPlan()
    assert alone.blocks(0) == 1


def test_drafts_are_shed_before_anybody_loses_a_seat() -> None:
    """Sequence 0 has one known token and six drafts, for which two blocks are missing."""
    running = [view_of(0, 4, 3, drafts=6), view_of(1, 4, 3)]
    table = Table(running, [], blocks=3)
    policy = Policy(Victims((1,)))
    plan = table.plan(policy)
    assert (items(plan), plan.preempted, policy.asked) == ([(0, 1), (1, 1)], (), [])
    roomy = Table(running, [], blocks=9)
    assert items(roomy.plan(policy)) == [(0, 7), (1, 1)]


def test_a_seat_is_taken_from_a_victim_for_a_waiting_request() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3)], seats=2)
    plan = table.plan(Policy(Victims((1,))))
    assert (items(plan), plan.preempted) == ([(0, 1), (2, 3)], (1,))


@given(
    running=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 4)), max_size=5),
    waiting=st.lists(st.integers(1, 30), max_size=5),
    blocks=st.integers(40, 60),
    spare=st.integers(0, 3),
    tokens=st.integers(1, 40),
    answer=st.sampled_from([Stop(), Skip(), Victims((4, 3, 2, 1, 0)), Victims((0, 1, 2, 3, 4))]),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_within_its_bounds_and_passes_the_validator(
    running: list[tuple[int, int, int]], waiting: list[int], blocks: int, spare: int, tokens: int, answer: Any
) -> None:
    """Table.plan asserts that the validator refuses nothing and audits the books."""
    views = [view_of(i, c + p, c, d if p == 1 else 0) for i, (c, p, d) in enumerate(running)]
    held = sum(-(-c // BLOCK) for c, _, _ in running)
    table = Table(
        views,
        [view_of(10 + i, n) for i, n in enumerate(waiting)],
        blocks=max(1, held + spare if blocks % 2 else blocks),
        tokens=tokens,
        seats=len(running) + 2,
    )
    plan = table.plan(Policy(answer))
    served = dict(items(plan))
    assert len(served) == len(plan.items)
    assert sum(served.values()) <= tokens
    assert len(running) - len(plan.preempted) + sum(i >= 10 for i in served) <= len(running) + 2
    for one in (*views, *table.view.waiting):
        needed = one.num_computed + served.get(one.sequence_id, 0)
        if one.sequence_id in served:
            assert 1 <= served[one.sequence_id] <= one.num_pending
            assert (table.blocks(one.sequence_id) or 0) * BLOCK >= needed
        elif one.sequence_id >= 10 or one.sequence_id in plan.preempted:
            assert table.blocks(one.sequence_id) is None
    if views and not plan.items and not plan.preempted and table.kv.capacity().free_blocks:
        assert len(views) == 1 or all(one.num_pending == 0 for one in views)


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
    plan, reasons = table.refuse(GOOD, item)
    assert (plan, reasons) == (StepPlan((GOOD,)), [reason])
    assert (table.blocks(0), table.blocks(1), table.blocks(2)) == (2, 1, None)


def test_a_sequence_that_the_plan_preempts_may_not_run_in_it() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 8, 4)], [])
    table.transaction.extend(0, 5)
    table.transaction.release(1)
    plan, reasons = table.refuse(GOOD, PlanItem(1, 4), preempted=(1, 1))
    assert plan == StepPlan((GOOD,), (1,))
    assert reasons == ["sequence 1 is unknown, preempted in this plan or listed twice"]
    assert (table.blocks(0), table.blocks(1)) == (2, None)


@pytest.mark.parametrize("released", [True, False])
def test_a_preempted_sequence_keeps_no_kv(released: bool) -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 8, 4)], [])
    if released:
        table.transaction.release(1)
    assert table.refuse(preempted=(1,)) == (StepPlan((), (1,)), [])
    assert (table.blocks(0), table.blocks(1)) == (1, None)


def test_what_does_not_run_cannot_be_preempted() -> None:
    table = Table([view_of(0, 5, 4)], [view_of(2, 3)])
    plan, reasons = table.refuse(preempted=(2, 77))
    assert plan == StepPlan()
    assert reasons == ["cannot preempt 2: it is not running", "cannot preempt 77: it is not running"]


def test_a_seat_that_preemption_frees_may_be_taken_in_the_same_plan() -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3)], seats=2)
    table.transaction.release(1)
    table.transaction.acquire(2)
    table.transaction.extend(2, 3)
    plan, reasons = table.refuse(PlanItem(2, 3), preempted=(1,))
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
    plan, reasons = table.refuse(*(PlanItem(*pair) for pair in wanted), preempted=tuple(preempted))
    pending = {one.sequence_id: one.num_pending for one in (*running, *table.view.waiting)}
    ids = [item.sequence_id for item in plan.items]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(plan.preempted)
    assert set(plan.preempted) <= {0, 1, 2}
    assert all(1 <= item.num_tokens <= pending[item.sequence_id] for item in plan.items)
    assert sum(item.num_tokens for item in plan.items) <= tokens
    assert 3 - len(plan.preempted) + sum(i > 2 for i in ids) <= 4
    assert len(reasons) == len(wanted) - len(ids) + sum(one not in (0, 1, 2) for one in set(preempted))
