"""Plain views, a policy and a pool for the tests of the kernel's planner and the validator behind every scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pluglm.kernel.core import Budget, CacheKey, Event, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.scheduler import Accept, Need, Skip, Stop, Victims
from pluglm.kernel.memory import StepKV
from pluglm.kernel.plan_check import refuse_bad_items
from pluglm.kernel.planner import PolicyScheduler, WhenFull
from pluglm.kv.manager import BlockManager
from pluglm.kv.transaction import BlockTransaction

BLOCK = 4


def view_of(sequence_id: int, known: int = 1, computed: int = 0, drafts: int = 0, **changes: Any) -> RequestView:
    """One that arrived at sequence_id seconds, with a prompt of all that is known."""
    view = RequestView(
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
    return replace(view, **changes)


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


class AdoptingTransaction(BlockTransaction):
    """Everyone who comes with a key finds num_adopted tokens cached, in blocks of its own."""

    num_adopted = 0

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        super().acquire(sequence_id)
        if key is None:
            return 0
        self.extend(sequence_id, self.num_adopted)
        return self.num_adopted


class AdoptingKV(BlockManager):
    def __init__(self, blocks: int, num_adopted: int) -> None:
        super().__init__(KVLayout(num_blocks=blocks, block_size=BLOCK), blocks)
        self.num_adopted = num_adopted

    def _make_transaction(self) -> BlockTransaction:
        transaction = AdoptingTransaction(self._books, BLOCK, self._max_blocks, self._closed)
        transaction.num_adopted = self.num_adopted
        return transaction


class Table:
    """A pool in which all who run, or wait with KV, hold their computed tokens, and one planned step over it.

    num_adopted: cached tokens that each waiting request finds.
    """

    def __init__(
        self,
        running: list[RequestView],
        waiting: list[RequestView],
        *,
        blocks: int = 100,
        tokens: int = 100,
        seats: int = 10,
        num_adopted: int = 0,
    ) -> None:
        self.kv = AdoptingKV(blocks, num_adopted)
        budget = Budget(num_tokens=tokens, num_seats=seats)
        running = [replace(one, holds_kv=True) for one in running]
        if num_adopted:
            keys = [CacheKey(b"", list(range(one.num_known)), one.num_known - 1) for one in waiting]
            waiting = [replace(one, cache_key=key) for one, key in zip(waiting, keys, strict=True)]
        self.view = StepView(step=0, now_s=0.0, budget=budget, running=tuple(running), waiting=tuple(waiting))
        setup = self.kv.transaction()
        for one in (*running, *waiting):
            if one.holds_kv:
                setup.acquire(one.sequence_id)
                setup.extend(one.sequence_id, one.num_computed)
        setup.commit()
        self.transaction = StepKV(self.kv.transaction(), "kv 'paged'")

    def plan(self, policy: Any, when_full: WhenFull = "shrink") -> StepPlan:
        """The planner's, committed. The validator must have nothing to say to it."""
        plan = PolicyScheduler(policy, when_full).plan(self.view, self.view.budget, self.transaction)
        if (checked := self.check(plan)) != (plan, []):
            raise AssertionError(f"the validator refuses {checked[1]}")
        return plan

    def check(self, plan: StepPlan) -> tuple[StepPlan, list[str]]:
        """What the validator leaves of a plan, committed, and its reasons."""
        answer = refuse_bad_items(plan, self.view, self.transaction, self.transaction.adopted)
        self.transaction.commit()
        self.kv.audit()
        return answer

    def blocks(self, sequence_id: int) -> int | None:
        try:
            return len(self.kv.block_table(sequence_id))
        except KeyError:
            return None


def items(plan: StepPlan) -> list[tuple[int, int]]:
    return [(item.sequence_id, item.num_tokens) for item in plan.items]
