"""The kernel's planner: decode and chunked prefill as one idea, admission, preemption; asks a policy.

The policy states preferences; every KV change, budget and progress rule is decided here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Literal, get_args

from pluglm.kernel.core import Budget, RequestView, StepPlan, StepView, new_item
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.kernel.interfaces.scheduler import Need, Preemption, SchedulingPolicy, Skip, Victims

WhenFull = Literal["shrink", "preempt", "refuse", "exit"]


@dataclass(slots=True)
class _Draft:
    """The plan so far. `running` shrinks as victims fall; `items` keeps the order of service."""

    view: StepView
    kv: KVTransaction
    tokens_left: int
    seats_left: int
    running: dict[int, RequestView]
    paused: dict[int, RequestView]  # waiting with KV, in arrival order; shrinks as they lose it or run
    items: dict[int, int] = field(default_factory=dict)
    lost: dict[Preemption, list[int]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    num_promised: int = 0  # tokens left for the decodes that are still to be served
    is_crowded: bool = False  # somebody waits who was preempted before

    def plan(self) -> StepPlan:
        return StepPlan(
            items=tuple(map(new_item, self.items, self.items.values())),
            preempted=tuple(self.lost.get("recompute", ())),
            offloaded=tuple(self.lost.get("offload", ())),
            paused=tuple(self.lost.get("pause", ())),
            refused=tuple(self.refused.items()),
        )


class PolicyScheduler:
    """A Scheduler made of a SchedulingPolicy. Running sequences first, then waiting ones while seats and KV last.

    Decodes, which have one known token to compute, come before prompts, and no draft or chunk takes the token of one:
    no text waits for a long prompt. A waiting sequence is admitted when the KV holds all of its known tokens, and
    it gets the blocks for them at once: two long prompts never wait for each other's blocks.

    when_full: what gives when a running sequence finds no block. `shrink`: idle cached blocks, then the policy's
    victims. `preempt`: the policy's victims, cached blocks only when there are none. `refuse`, `exit`: cached blocks;
    then the request that found none ends, alone or with all others.
    """

    def __init__(self, policy: SchedulingPolicy, when_full: WhenFull = "shrink") -> None:
        self.policy = policy
        self._when_full = when_full
        self._may_preempt = when_full in ("shrink", "preempt")

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        running = {request.sequence_id: request for request in view.running}
        paused = {request.sequence_id: request for request in view.waiting if request.holds_kv}
        draft = _Draft(view, kv, budget.num_tokens, budget.num_seats - len(running), running, paused)
        draft.is_crowded = any(request.num_preemptions for request in view.waiting)
        order = [running[one] for one in dict.fromkeys(self.policy.order_running(view)) if one in running]
        decodes = [one for one in order if one.num_known - one.num_computed <= 1]
        prompts = [one for one in order if one.num_known - one.num_computed > 1]
        for number, request in enumerate([*decodes, *prompts]):
            draft.num_promised = max(0, len(decodes) - number - 1)
            if draft.tokens_left > 0 and request.sequence_id in running:
                self._serve_running(draft, request)
        self._admit_waiting(draft)
        return draft.plan()

    def _serve_running(self, draft: _Draft, request: RequestView) -> None:
        num_tokens = self._share(draft, request)
        undrafted = request.num_known - request.num_computed
        if num_tokens > undrafted and not _extend(draft, request, request.num_computed + num_tokens):
            num_tokens = undrafted  # guesses are not worth anyone's seat
        if num_tokens <= 0:
            return
        if self._find_room(draft, request, request.num_computed + num_tokens):
            draft.items[request.sequence_id] = num_tokens
            draft.tokens_left -= num_tokens
        elif not self._may_preempt:
            self._refuse(draft, request, num_tokens)
        elif len(draft.running) > 1:  # alone it would evict itself for ever; that is refused at the door
            _remove(draft, request.sequence_id, "recompute")

    def _find_room(self, draft: _Draft, request: RequestView, num_tokens: int) -> bool:
        """KV for num_tokens in all, made by the cache, by victims of the policy, and at last by those that are paused.

        A waiting request takes from paused ones only when nothing runs: else they may get their seats back.
        """
        evict = self._when_full != "preempt"
        while not _extend(draft, request, num_tokens, evict):
            is_running = request.sequence_id in draft.running
            if (self._may_preempt or not is_running) and self._make_room(draft, request, "kv"):
                evict = True  # what a victim gave back is cached as well, or everyone would fall for one block
                continue
            if not evict:
                evict = True
            elif not (is_running or not draft.running) or not _reclaim(draft, request):
                return False
        return True

    def _keep_headroom(self, draft: _Draft, request: RequestView) -> bool:
        """Once somebody had to give way, whoever comes in leaves a free block for each one that runs then.

        Else it would take the room of another's next token, and the two would throw each other out in turn.
        """
        num_seats = draft.view.budget.num_seats
        while draft.is_crowded and 0 < num_seats - draft.seats_left >= draft.kv.free_blocks():
            if not self._make_room(draft, request, "kv"):
                return False
        return True

    def _refuse(self, draft: _Draft, request: RequestView, num_tokens: int) -> None:
        draft.refused[request.sequence_id] = (
            f"the KV pool is full: its token {request.num_computed + num_tokens} finds no free block while "
            f"{len(draft.running)} requests run; raise engine.kv_memory or the sizes set in kv, lower "
            f"engine.max_num_seqs or set engine.when_kv_full to preempt or shrink"
        )
        draft.kv.release(request.sequence_id)
        del draft.running[request.sequence_id]
        draft.seats_left += 1

    def _admit_waiting(self, draft: _Draft) -> None:
        """Nobody is admitted in a step that preempted for KV: the room just made belongs to those that run."""
        if draft.lost:
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
        if request.holds_kv and request.sequence_id not in draft.paused:
            return False  # another one has just taken its KV, and the room left by it
        num_tokens = self._share(draft, request)
        if num_tokens <= 0:
            return True
        while draft.seats_left <= 0:
            if not self._make_room(draft, request, "seat"):
                return self._may_skip(draft, request, "seat")
        num_computed = request.num_computed
        if not request.holds_kv:
            num_computed = draft.kv.acquire(request.sequence_id, request.cache_key) or num_computed
        num_tokens = min(num_tokens, request.num_known - num_computed + request.num_drafts)
        num_held = max(request.num_known, num_computed + num_tokens)
        if not self._find_room(draft, request, num_held) or not self._keep_headroom(draft, request):
            if request.holds_kv:
                draft.kv.trim(request.sequence_id, request.num_computed)
            else:
                draft.kv.release(request.sequence_id)
            return self._may_skip(draft, request, "kv")
        draft.paused.pop(request.sequence_id, None)
        draft.seats_left -= 1
        draft.items[request.sequence_id] = num_tokens
        draft.tokens_left -= num_tokens
        return True

    def _share(self, draft: _Draft, request: RequestView) -> int:
        tokens_left = max(1, draft.tokens_left - draft.num_promised)
        wanted = operator.index(self.policy.share(draft.view, request, tokens_left))
        return min(wanted, request.num_pending, tokens_left)

    def _make_room(self, draft: _Draft, request: RequestView, need: Need) -> bool:
        """Preempt the policy's next victim; False when it names none that still runs."""
        answer = self.policy.on_blocked(draft.view, request, need)
        if not isinstance(answer, Victims):
            return False
        if answer.mode not in get_args(Preemption):
            raise ValueError(f"on_blocked gave mode {answer.mode!r}; it is one of {', '.join(get_args(Preemption))}")
        mode = "recompute" if need == "kv" and answer.mode == "pause" else answer.mode
        for victim in answer.sequence_ids:
            if victim in draft.running and victim != request.sequence_id:
                _remove(draft, victim, mode)
                return True
        return False

    def _may_skip(self, draft: _Draft, request: RequestView, need: Need) -> bool:
        return isinstance(self.policy.on_blocked(draft.view, request, need), Skip)


def _extend(draft: _Draft, request: RequestView, num_tokens: int, evict: bool = True) -> bool:
    try:
        draft.kv.extend(request.sequence_id, num_tokens, evict)
    except KVExhausted:
        return False
    return True


def _remove(draft: _Draft, sequence_id: int, mode: Preemption) -> None:
    """Its seat and its tokens of this step go back, and its KV unless it is paused."""
    request = draft.running.pop(sequence_id)
    if mode == "pause":
        draft.kv.trim(sequence_id, request.num_computed)
    else:
        draft.kv.release(sequence_id)
    draft.tokens_left += draft.items.pop(sequence_id, 0)
    draft.seats_left += 1
    draft.lost.setdefault(mode, []).append(sequence_id)


def _reclaim(draft: _Draft, request: RequestView) -> bool:
    """Take the KV of the paused sequence that arrived last; it computes its tokens again. False when there is none."""
    for sequence_id in reversed(draft.paused):
        if sequence_id != request.sequence_id:
            del draft.paused[sequence_id]
            draft.kv.release(sequence_id)
            draft.lost.setdefault("recompute", []).append(sequence_id)
            return True
    return False
