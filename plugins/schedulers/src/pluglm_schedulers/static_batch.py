"""Static batching, the baseline that continuous batching is measured against: a whole planner, no policy.

Knows the KV only as room for whole requests; nobody who runs is ever preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pluglm.kernel.core import PlanItem, StepPlan
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Scheduler
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget, RequestView, StepView
    from pluglm.kernel.interfaces.kv import KVTransaction


class StaticBatchScheduler(Scheduler):
    """Takes a batch when nothing runs, in arrival order, and admits nobody until its last member has ended.

    A batch holds at most as many requests as there are seats, and ends before the first whose prompt and new tokens
    all together find no room in the KV: every member keeps room for its whole life. Further outputs of a request
    (n > 1) join its batch as soon as they are forked, one after another as seats and room allow. Nobody who runs is
    ever preempted; of outputs that wait, the last loses its share of the prompt when it would keep the first from
    starting. Decodes come before chunks of prompts, and those that run before those that have not started.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self._batch: frozenset[str] = frozenset()  # request ids
        self._shares = StepShares(prompt_share=1)

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        """Reserves every step: drafts that were refused, and members that got no tokens yet, hold less than that."""
        running = {one.sequence_id: one for one in view.running}
        members = [running[one] for one in self._shares.in_turn(view, view.running)]
        waiting = [one for one in view.waiting if one.request_id in self._batch]
        members += [one for one in waiting if one.num_pending]
        idle = [one for one in waiting if one.holds_kv]
        for one in idle:  # a lane of a search that waits for the others needs no room to grow
            kv.trim(one.sequence_id, one.num_computed)
        reserved, preempted = _reserve(members or view.waiting[: budget.num_seats], idle, running, kv)
        if not members:
            self._batch = frozenset(one.request_id for one, _ in reserved)
        items, tokens_left, seats_left = [], budget.num_tokens, budget.num_seats - len(running)
        for one, num_adopted in reserved:
            most = min(one.num_pending - num_adopted, _lifetime(one) - one.num_computed - num_adopted)
            num_tokens = min(most, self._shares.share(one, tokens_left))
            new_seat = one.sequence_id not in running
            if num_tokens > 0 and seats_left >= new_seat:
                items.append(PlanItem(one.sequence_id, num_tokens))
                tokens_left, seats_left = tokens_left - num_tokens, seats_left - new_seat
            elif new_seat:  # the room stays free for it: nobody else is admitted meanwhile
                _give_back(one, kv)
        return StepPlan(tuple(items), tuple(preempted))

    def checkpoint(self) -> Callable[[], None]:
        restore_shares, batch = self._shares.checkpoint(), self._batch

        def restore() -> None:
            restore_shares()
            self._batch = batch

        return restore


Reserved = list[tuple["RequestView", int]]


def _reserve(
    requests: Sequence[RequestView], idle: list[RequestView], running: Mapping[int, RequestView], kv: KVTransaction
) -> tuple[Reserved, list[int]]:
    """The requests, in order, up to the first that finds no room for its whole life, with what each one adopted.

    Also those of the idle ones that lost their KV while they waited, so that the first of all fits.
    """
    preempted: list[int] = []
    idle = [one for one in idle if one not in requests[:1]]
    while not (reserved := _reserve_all(requests, running, kv)) and idle:
        preempted.append(idle.pop().sequence_id)
        kv.release(preempted[-1])
        requests = [one for one in requests if one.sequence_id != preempted[-1]]
    return reserved, preempted


def _reserve_all(requests: Iterable[RequestView], running: Mapping[int, RequestView], kv: KVTransaction) -> Reserved:
    reserved: Reserved = []
    for one in requests:
        num_adopted = 0
        if not one.holds_kv and one.sequence_id not in running:
            num_adopted = kv.acquire(one.sequence_id, one.cache_key)
        try:
            kv.extend(one.sequence_id, _lifetime(one))
        except KVExhausted:
            if one.sequence_id not in running:
                _give_back(one, kv)
            break
        reserved.append((one, num_adopted))
    return reserved


def _give_back(request: RequestView, kv: KVTransaction) -> None:
    """What one that waits took in this step; a forked one keeps what it came with."""
    if request.holds_kv:
        kv.trim(request.sequence_id, request.num_computed)
    else:
        kv.release(request.sequence_id)


def _lifetime(request: RequestView) -> int:
    """Tokens of a request at its longest."""
    return request.num_prompt + request.max_new_tokens
