"""How the kernel's planner makes room: whom it preempts how, what it reserves, what it takes from those that pause."""

from __future__ import annotations

from typing import Any

import pytest
from planner_cases import BLOCK, Policy, Table, items, view_of

from pluglm.kernel.core import CacheKey, StepPlan
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.scheduler import Skip, Stop, Victims


def paused(sequence_id: int, computed: int) -> Any:
    return view_of(sequence_id, computed + 1, computed, holds_kv=True)


def lost(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    return {name: ids for name in ("preempted", "offloaded", "paused") if (ids := getattr(plan, name))}


@pytest.mark.parametrize(("mode", "field", "kept"), [("pause", "paused", 1), ("offload", "offloaded", None)])
def test_a_seat_is_taken_in_the_mode_that_the_policy_names(mode: Any, field: str, kept: int | None) -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [view_of(2, 3)], seats=2)
    plan = table.plan(Policy(Victims((1,), mode)))
    assert (items(plan), lost(plan)) == ([(0, 1), (2, 3)], {field: (1,)})
    assert table.blocks(1) == kept


@pytest.mark.parametrize(("mode", "field"), [("pause", "preempted"), ("offload", "offloaded")])
def test_kv_is_never_made_by_a_pause(mode: Any, field: str) -> None:
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [], blocks=2)
    plan = table.plan(Policy(Victims((1,), mode)))
    assert (items(plan), lost(plan)) == ([(0, 1)], {field: (1,)})
    assert (table.blocks(0), table.blocks(1)) == (2, None)


def test_one_that_is_paused_gives_back_the_room_of_this_step() -> None:
    """Sequence 0 was served first and got a second block; then the waiting one takes its seat."""
    table = Table([view_of(0, 5, 4)], [view_of(1, 3)], seats=1)
    plan = table.plan(Policy(Victims((0,), "pause")))
    assert (items(plan), lost(plan)) == ([(1, 3)], {"paused": (0,)})
    assert table.blocks(0) == 1


def test_a_prompt_gets_the_blocks_for_all_it_knows_or_waits() -> None:
    """Two prompts of six blocks, ten blocks, chunks of a block: the first reserves six and the second stays out."""
    table = Table([], [view_of(0, 24), view_of(1, 24)], blocks=10)
    plan = table.plan(Policy(Stop(), share=BLOCK))
    assert items(plan) == [(0, BLOCK)]
    assert (table.blocks(0), table.blocks(1)) == (6, None)


@pytest.mark.parametrize("when_full", ["refuse", "exit"])
def test_without_preemption_the_one_that_finds_nothing_is_refused(when_full: Any) -> None:
    """It gives its own block back, which serves the next one."""
    policy = Policy(Victims((1, 0)))
    table = Table([view_of(0, 5, 4), view_of(1, 5, 4)], [], blocks=2)
    plan = table.plan(policy, when_full)
    assert items(plan) == [(1, 1)]
    ((refused, reason),) = plan.refused
    assert refused == 0
    assert "its token 5 finds no free block while 2 requests run" in reason
    assert policy.asked == []
    assert (table.blocks(0), table.blocks(1)) == (None, 2)


def test_drafts_are_shed_before_a_request_is_refused() -> None:
    table = Table([view_of(0, 4, 3, drafts=6)], [], blocks=1)
    plan = table.plan(Policy(), "refuse")
    assert (items(plan), plan.refused) == ([(0, 1)], ())


def test_one_that_waits_with_its_kv_takes_up_where_it_was() -> None:
    """Paused or forked: its table is extended, not started again."""
    table = Table([view_of(0, 5, 4)], [paused(1, 4)])
    assert items(table.plan(Policy())) == [(0, 1), (1, 1)]
    assert table.blocks(1) == 2


def test_a_running_one_takes_from_those_that_pause_when_the_policy_has_no_victim() -> None:
    """From the one that arrived last."""
    table = Table([view_of(0, 5, 4)], [paused(1, 4), paused(2, 4)], blocks=3)
    plan = table.plan(Policy(Stop()))
    assert (items(plan), lost(plan)) == ([(0, 1)], {"preempted": (2,)})
    assert [table.blocks(i) for i in range(3)] == [2, 1, None]


def test_a_waiting_one_takes_nothing_from_those_that_pause_while_somebody_runs() -> None:
    table = Table([view_of(0, 5, 4)], [paused(1, 4), view_of(2, 8)], blocks=4, seats=2)
    policy = Policy(Skip())
    plan = table.plan(policy)
    assert (items(plan), lost(plan)) == ([(0, 1), (1, 1)], {})
    table = Table([view_of(0, 4, 3)], [view_of(1, 8), paused(2, 4)], blocks=3)
    plan = table.plan(Policy(Skip()))
    assert (items(plan), lost(plan)) == ([(0, 1), (2, 1)], {})


def test_with_nobody_running_the_first_that_waits_takes_what_it_needs() -> None:
    """Only as far as needed, the last arrival first; whoever has just lost its KV is not admitted in the same step."""
    table = Table([], [view_of(0, 8), paused(1, 4), paused(2, 4), paused(3, 4)], blocks=3)
    plan = table.plan(Policy(Stop()))
    assert (items(plan), lost(plan)) == ([(0, 8)], {"preempted": (3, 2)})
    assert [table.blocks(i) for i in range(4)] == [2, 1, None, None]


def test_the_first_to_wait_may_be_paused_itself_and_grow_at_the_cost_of_the_others() -> None:
    table = Table([], [paused(0, 4), paused(1, 4)], blocks=2)
    plan = table.plan(Policy(Stop()))
    assert (items(plan), lost(plan)) == ([(0, 1)], {"preempted": (1,)})


@pytest.mark.parametrize(("blocks", "is_admitted"), [(5, False), (6, True)])
def test_once_somebody_fell_whoever_comes_in_leaves_a_block_for_each_that_runs(blocks: int, is_admitted: bool) -> None:
    """After this step sequence 0 holds two blocks, and so would the newcomer, which counts among those that run."""
    fell = view_of(1, 5, num_preemptions=1)
    table = Table([view_of(0, 5, 4)], [fell], blocks=blocks)
    plan = table.plan(Policy(Stop()))
    assert items(plan) == [(0, 1), (1, 5)][: 1 + is_admitted]
    assert table.blocks(1) == (2 if is_admitted else None)
    calm = Table([view_of(0, 5, 4)], [view_of(1, 5)], blocks=4)
    assert items(calm.plan(Policy(Stop()))) == [(0, 1), (1, 5)]


def test_one_that_waits_with_kv_and_is_not_let_in_keeps_only_what_it_had() -> None:
    table = Table([view_of(0, 5, 4)], [view_of(1, 5, 4, holds_kv=True, num_preemptions=1)], blocks=4)
    assert items(table.plan(Policy(Stop()))) == [(0, 1)]
    assert table.blocks(1) == 1


@pytest.mark.parametrize("num_adopted", [0, 3, 4, 8])
def test_cached_tokens_are_not_computed_again(num_adopted: int) -> None:
    table = Table([], [view_of(0, 9)], num_adopted=num_adopted)
    assert items(table.plan(Policy())) == [(0, 9 - num_adopted)]
    assert table.blocks(0) == 3


def test_what_was_adopted_is_given_back_when_the_rest_does_not_fit() -> None:
    table = Table([view_of(0, 4, 3)], [view_of(1, 30)], blocks=4, num_adopted=8)
    assert items(table.plan(Policy())) == [(0, 1)]
    assert table.blocks(1) is None
    assert table.transaction.adopted == {}


@pytest.mark.parametrize("num_adopted", [9, 100, -1, 1.5, None])
def test_a_manager_that_claims_more_than_may_be_adopted_is_named(num_adopted: Any) -> None:
    """The last known token is always computed, since its logits are needed."""
    table = Table([], [])
    table.kv.num_adopted = 0

    def acquire(sequence_id: int, key: CacheKey | None = None) -> Any:
        return num_adopted

    table.transaction._transaction.acquire = acquire
    with pytest.raises(ComponentFailure, match=r"kv 'paged' acquire returned .*, 0 to 8 tokens may be adopted"):
        table.transaction.acquire(0, CacheKey(b"", list(range(9)), 8))
