"""Static batching, the baseline that continuous batching is measured against: a whole planner, no policy.

Knows the KV only as room for whole requests; knows nothing of preemption, since it never has to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pluglm.kernel.core import PlanItem, StepPlan
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Scheduler

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget, RequestView, StepView
    from pluglm.kernel.interfaces.kv import KVTransaction


class StaticBatchScheduler(Scheduler):
    """Takes a batch when nothing runs, in arrival order, and admits nobody until its last member has ended.

    A batch holds at most as many requests as there are seats, and ends before the first whose prompt and new tokens
    all together find no room in the KV: every member keeps room for its whole life, so nobody is ever preempted.
    Prompts are computed in chunks within the token budget, those that run before those that have not started.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self._batch: frozenset[int] = frozenset()

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        """Reserves every step: drafts that were refused, and members that got no tokens yet, hold less than that."""
        members = [*view.running, *(one for one in view.waiting if one.sequence_id in self._batch)]
        running = {one.sequence_id for one in view.running}
        reserved = _reserve(members or view.waiting[: budget.num_seats], running, kv)
        if not members:
            self._batch = frozenset(one.sequence_id for one in reserved)
        items, tokens_left, seats_left = [], budget.num_tokens, budget.num_seats - len(running)
        for one in reserved:
            num_tokens = min(one.num_pending, tokens_left, _lifetime(one) - one.num_computed)
            new_seat = one.sequence_id not in running
            if num_tokens > 0 and seats_left >= new_seat:
                items.append(PlanItem(one.sequence_id, num_tokens))
                tokens_left, seats_left = tokens_left - num_tokens, seats_left - new_seat
            elif new_seat:  # the room stays free for it: nobody else is admitted meanwhile
                kv.release(one.sequence_id)
        return StepPlan(tuple(items))


def _reserve(requests: Iterable[RequestView], running: set[int], kv: KVTransaction) -> list[RequestView]:
    """The requests, in order, up to the first that finds no room for its whole life."""
    reserved = []
    for one in requests:
        if one.sequence_id not in running:
            kv.acquire(one.sequence_id)
        try:
            kv.extend(one.sequence_id, _lifetime(one))
        except KVExhausted:
            if one.sequence_id not in running:
                kv.release(one.sequence_id)
            break
        reserved.append(one)
    return reserved


def _lifetime(request: RequestView) -> int:
    """Tokens of a request at its longest."""
    return request.num_prompt + request.max_new_tokens
