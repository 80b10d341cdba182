"""The validator behind every scheduler: refuses what breaks a rule, item by item, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from pluglm.kernel.core import PlanItem, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.kv import KVTransaction


@dataclass(slots=True)
class _Check:
    """Who is in nothing of the plan yet (left), and who keeps a seat (running); adopted is what the KV manager gave."""

    view: StepView
    kv: KVTransaction
    adopted: Mapping[int, int]
    running: dict[int, RequestView]
    left: dict[int, RequestView]
    reasons: list[str] = field(default_factory=list)


def refuse_bad_items(
    plan: StepPlan, view: StepView, kv: KVTransaction, adopted: Mapping[int, int]
) -> tuple[StepPlan, list[str]]:
    """The plan without the items that break a rule, and one reason for each. A refused item never costs the others."""
    running = {request.sequence_id: request for request in view.running}
    check = _Check(view, kv, adopted, running, running | {request.sequence_id: request for request in view.waiting})
    kept = StepPlan(
        preempted=tuple(_losing(check, plan.preempted, "preempt", or_paused=True)),
        offloaded=tuple(_losing(check, plan.offloaded, "offload")),
        paused=tuple(_losing(check, plan.paused, "pause", keeps_kv=True)),
        refused=tuple(_ending(check, plan.refused)),
        items=tuple(_items(check, plan.items)),
    )
    planned = {item.sequence_id for item in kept.items}
    for one in [one for one in adopted if one not in planned]:  # acquired for nothing
        check.kv.release(one)
    return kept, check.reasons


def _losing(
    check: _Check, sequence_ids: Iterable[int], what: str, or_paused: bool = False, keeps_kv: bool = False
) -> Iterable[int]:
    """Those that may lose their seat; the KV that a scheduler did not give back goes now."""
    for one in dict.fromkeys(sequence_ids):
        request = check.left.get(one)
        if request is None or not (one in check.running or (or_paused and request.holds_kv)):
            check.reasons.append(f"cannot {what} {one}: it is not running")
            continue
        _take(check, request, keeps_kv)
        yield one


def _ending(check: _Check, refused: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
    for one, reason in refused:
        if one not in check.left:
            check.reasons.append(f"cannot refuse {one}: it is unknown, or loses its seat in this plan")
            continue
        _take(check, check.left[one], keeps_kv=False)
        yield one, str(reason)


def _items(check: _Check, items: Iterable[PlanItem]) -> Iterable[PlanItem]:
    budget, seats, tokens = check.view.budget, len(check.running), 0
    for item in items:
        one, num_tokens, request = item.sequence_id, item.num_tokens, check.left.get(item.sequence_id)
        # of those that are pending, none whose KV was adopted in this transaction
        num_pending = 0 if request is None else request.num_pending - check.adopted.get(one, 0)
        new_seat = one not in check.running
        reason = None
        if request is None:
            reason = "is unknown, leaves in this plan or is listed twice"
        elif not isinstance(num_tokens, int) or not 1 <= num_tokens <= num_pending:
            reason = f"asks for {num_tokens} tokens, 1 to {num_pending} are pending"
        elif tokens + num_tokens > budget.num_tokens:
            reason = f"exceeds the budget of {budget.num_tokens} tokens"
        elif seats + new_seat > budget.num_seats:
            reason = f"exceeds the {budget.num_seats} seats"
        if reason is None:
            del check.left[one]
            tokens, seats = tokens + num_tokens, seats + new_seat
            yield item
            continue
        check.reasons.append(f"sequence {one} {reason}")
        if request is not None:
            _trim(check, request, request.holds_kv)


def _take(check: _Check, request: RequestView, keeps_kv: bool) -> None:
    """Whoever loses its seat, or ends, is in nothing else of the plan."""
    del check.left[request.sequence_id]
    check.running.pop(request.sequence_id, None)
    _trim(check, request, keeps_kv)


def _trim(check: _Check, request: RequestView, keeps_kv: bool) -> None:
    """Return the KV that a sequence may not have in this step, or all of it."""
    with suppress(ValueError):  # it holds none: never acquired, or released already
        if keeps_kv:
            check.kv.trim(request.sequence_id, request.num_computed)
        else:
            check.kv.release(request.sequence_id)
