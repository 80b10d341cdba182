"""The kernel's planner: decode and chunked prefill as one idea, admission, preemption by recompute; asks a policy.

The policy states preferences; every KV change, budget and progress rule is decided here.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, field

from pluglm.kernel.core import Budget, PlanItem, RequestView, StepPlan, StepView
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.kernel.interfaces.scheduler import Need, SchedulingPolicy, Skip, Victims


@dataclass(slots=True)
class _Draft:
    """The plan so far. `running` shrinks as victims fall; `items` keeps the order of service."""

    view: StepView
    kv: KVTransaction
    tokens_left: int
    seats_left: int
    running: dict[int, RequestView]
    items: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)


class PolicyScheduler:
    """A Scheduler made of a SchedulingPolicy. Running sequences first, then waiting ones while seats and KV last."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        running = {request.sequence_id: request for request in view.running}
        draft = _Draft(view, kv, budget.num_tokens, budget.num_seats - len(running), running)
        for sequence_id in list(self.policy.order_running(view)):
            if sequence_id in draft.running and sequence_id not in draft.items and draft.tokens_left > 0:
                self._serve_running(draft, draft.running[sequence_id])
        self._admit_waiting(draft)
        return StepPlan(tuple(PlanItem(*item) for item in draft.items.items()), tuple(draft.preempted))

    def _serve_running(self, draft: _Draft, request: RequestView) -> None:
        num_tokens = self._share(draft, request)
        while num_tokens > 0 and not _extend(draft, request, num_tokens):
            undrafted = request.num_known - request.num_computed
            if num_tokens > undrafted:  # guesses are not worth anyone's seat
                num_tokens = undrafted
            elif not self._make_room(draft, request, "kv"):
                if len(draft.running) > 1:  # alone it would evict itself for ever; the engine refuses that at the door
                    _preempt(draft, request.sequence_id)
                return
        if num_tokens > 0:
            _take(draft, request, num_tokens)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Nobody is admitted in a step that preempted for KV: the room just made belongs to those that run."""
        if draft.preempted:
            return
        waiting = {request.sequence_id: request for request in draft.view.waiting}
        for sequence_id in self.policy.order_waiting(draft.view):
            request = waiting.pop(sequence_id, None)
            if draft.tokens_left <= 0:
                return
            if request is not None and not self._admit(draft, request):
                return

    def _admit(self, draft: _Draft, request: RequestView) -> bool:
        """False when nothing behind this request may be looked at."""
        num_tokens = self._share(draft, request)
        if num_tokens <= 0:
            return True
        while draft.seats_left <= 0:
            if not self._make_room(draft, request, "seat"):
                return self._may_skip(draft, request, "seat")
        draft.kv.acquire(request.sequence_id)
        while not _extend(draft, request, num_tokens):
            if not self._make_room(draft, request, "kv"):
                draft.kv.release(request.sequence_id)
                return self._may_skip(draft, request, "kv")
        draft.seats_left -= 1
        _take(draft, request, num_tokens)
        return True

    def _share(self, draft: _Draft, request: RequestView) -> int:
        wanted = operator.index(self.policy.share(draft.view, request, draft.tokens_left))
        return min(wanted, request.num_pending, draft.tokens_left)

    def _make_room(self, draft: _Draft, request: RequestView, need: Need) -> bool:
        """Preempt the policy's next victim; False when it names none that still runs."""
        answer = self.policy.on_blocked(draft.view, request, need)
        if not isinstance(answer, Victims):
            return False
        for victim in answer.sequence_ids:
            if victim in draft.running and victim != request.sequence_id:
                _preempt(draft, victim)
                return True
        return False

    def _may_skip(self, draft: _Draft, request: RequestView, need: Need) -> bool:
        return isinstance(self.policy.on_blocked(draft.view, request, need), Skip)


def _extend(draft: _Draft, request: RequestView, num_tokens: int) -> bool:
    try:
        draft.kv.extend(request.sequence_id, request.num_computed + num_tokens)
    except KVExhausted:
        return False
    return True


def _take(draft: _Draft, request: RequestView, num_tokens: int) -> None:
    draft.items[request.sequence_id] = num_tokens
    draft.tokens_left -= num_tokens


def _preempt(draft: _Draft, sequence_id: int) -> None:
    """Seat, KV and tokens of this step go back; the sequence will be computed again from its first token."""
    del draft.running[sequence_id]
    draft.kv.release(sequence_id)
    draft.tokens_left += draft.items.pop(sequence_id, 0)
    draft.seats_left += 1
    draft.preempted.append(sequence_id)


def refuse_bad_items(plan: StepPlan, view: StepView, kv: KVTransaction) -> tuple[StepPlan, list[str]]:
    """The plan without the items that break a rule, and one reason for each. A refused item never costs the others."""
    running = {request.sequence_id: request for request in view.running}
    known = running | {request.sequence_id: request for request in view.waiting}
    reasons = [f"cannot preempt {one}: it is not running" for one in plan.preempted if one not in running]
    preempted = tuple(dict.fromkeys(one for one in plan.preempted if one in running))
    for one in preempted:
        del running[one]
        _take_back(one, running, kv)  # nothing is left to do when the scheduler released it
    seats, tokens, kept = len(running), 0, dict[int, PlanItem]()
    for item in plan.items:
        request = known.get(item.sequence_id)
        new_seat = item.sequence_id not in running
        reason = None
        if request is None or item.sequence_id in preempted or item.sequence_id in kept:
            reason = "is unknown, preempted in this plan or listed twice"
        elif not isinstance(item.num_tokens, int) or not 1 <= item.num_tokens <= request.num_pending:
            reason = f"asks for {item.num_tokens} tokens, 1 to {request.num_pending} are pending"
        elif tokens + item.num_tokens > view.budget.num_tokens:
            reason = f"exceeds the budget of {view.budget.num_tokens} tokens"
        elif seats + new_seat > view.budget.num_seats:
            reason = f"exceeds the {view.budget.num_seats} seats"
        if reason:
            reasons.append(f"sequence {item.sequence_id} {reason}")
            if item.sequence_id not in kept:
                _take_back(item.sequence_id, running, kv)
            continue
        kept[item.sequence_id], tokens, seats = item, tokens + item.num_tokens, seats + new_seat
    return StepPlan(tuple(kept.values()), preempted), reasons


def _take_back(sequence_id: int, running: dict[int, RequestView], kv: KVTransaction) -> None:
    """Return the KV that a sequence may not have in this step."""
    with suppress(ValueError):  # it holds none: never acquired, or released already
        if sequence_id in running:
            kv.trim(sequence_id, running[sequence_id].num_computed)
        else:
            kv.release(sequence_id)
