"""The kernel's planner over the paged KV books and plain views: who gets tokens, seats and KV, and who loses them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import BLOCK, Policy, Table, items, view_of

from pluglm.kernel.core import StepPlan
from pluglm.kernel.interfaces.scheduler import Skip, Stop, Victims


def test_decode_comes_before_prefill_and_a_long_prompt_gets_the_rest_in_chunks() -> None:
    table = Table([view_of(0, 9, 8), view_of(1, 30, 10), view_of(2, 5, 4)], [view_of(3, 50)], tokens=40)
    assert items(table.plan(Policy())) == [(0, 1), (2, 1), (1, 20), (3, 18)]
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
    """Table.plan asks the validator, which must refuse nothing, and audits the books."""
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


def test_no_draft_and_no_chunk_takes_the_token_of_a_decode() -> None:
    """A policy that names the long prompt first, and gives everyone all that is left."""
    running = [view_of(0, 40, 8), view_of(1, 9, 8, drafts=8), view_of(2, 5, 4), view_of(3, 5, 4, drafts=2)]
    assert items(Table(running, [], tokens=5).plan(Policy())) == [(1, 3), (2, 1), (3, 1)]
    assert items(Table(running, [], tokens=20).plan(Policy())) == [(1, 9), (2, 1), (3, 3), (0, 7)]
    assert items(Table(running, [], tokens=2).plan(Policy())) == [(1, 1), (2, 1)]
