"""I6 to I8: what a plan may hold, what was computed because of it, and that the engine gets on. Knows no policy."""

from __future__ import annotations

from collections import Counter

from trace_case import Trace
from trace_parts import Rig
from trace_play import Frame, ViolationError, Watcher

from pluglm.kernel.core import RequestView, StepPlan, StepView

PATIENCE = 30  # steps without progress, or so many more as computing everything again may take


class PlanWatch(Watcher):
    """Plans and batches against what was known before the step."""

    def __init__(self, trace: Trace, rig: Rig, counts: Counter[str]) -> None:
        self._core, self._counts = rig.core, counts

    def after_step(self, frame: Frame) -> None:
        for one in self._core.roster.live():
            most = len(one.token_ids) if one.parked is not None else len(one.token_ids) - 1
            if not 0 <= one.num_sound <= one.num_computed <= most:
                what = f"{one.num_sound} sound and {one.num_computed} computed of {len(one.token_ids)} known tokens"
                raise ViolationError("I6", f"sequence {one.sequence_id} has {what}")
        if frame.view is None or frame.plan is None:
            return
        self._counts["steps with a plan"] += 1
        for mode, lost in (("recompute", "preempted"), ("offload", "offloaded"), ("pause", "paused")):
            self._counts[f"preempted: {mode}"] += len(getattr(frame.plan, lost))
        self._check_budget(frame.view, frame.plan)
        self._check_batch(frame, frame.view, frame.plan)

    def _check_budget(self, view: StepView, plan: StepPlan) -> None:
        lost = [*plan.preempted, *plan.offloaded, *plan.paused, *(one for one, _ in plan.refused)]
        planned = [item.sequence_id for item in plan.items]
        if len({*lost, *planned}) != len(lost) + len(planned):
            raise ViolationError("I6", f"somebody is twice in the plan {plan}")
        num_tokens = sum(item.num_tokens for item in plan.items)
        if num_tokens > view.budget.num_tokens:
            raise ViolationError("I7", f"{num_tokens} tokens planned of {view.budget.num_tokens}")
        seated = ({one.sequence_id for one in view.running} - {*lost}) | {*planned}
        most = view.budget.num_seats
        if len(seated) > most or len(self._core.roster.running) > most:
            raise ViolationError("I7", f"{len(seated)} sequences have one of {most} seats")

    def _check_batch(self, frame: Frame, view: StepView, plan: StepPlan) -> None:
        views = {one.sequence_id: one for one in (*view.running, *view.waiting)}
        planned = {item.sequence_id: item.num_tokens for item in plan.items}
        for segment in (one for inputs in frame.batches for one in inputs.segments):
            sequence_id, request = segment.sequence_id, views.get(segment.sequence_id)
            self._counts["computed tokens"] += segment.num_query
            if request is None or planned.get(sequence_id) != segment.num_query or segment.num_query < 1:
                what = f"{planned.get(sequence_id)} tokens of sequence {sequence_id} planned"
                raise ViolationError("I6", f"{what}, {segment.num_query} computed")
            self._check_gap(request, segment.num_context, segment.num_query)
        if frame.batches and len(frame.batches) > 1:
            raise ViolationError("I7", f"{len(frame.batches)} batches in one step")

    def _check_gap(self, request: RequestView, num_context: int, num_query: int) -> None:
        if not request.num_computed <= num_context < request.num_known:
            what = (
                f"{num_context} tokens count as computed, {request.num_computed} were and {request.num_known} are known"
            )
            raise ViolationError("I6", f"sequence {request.sequence_id}: {what}")
        if num_context + num_query > request.num_known + request.num_drafts:
            what = f"{num_context} + {num_query} tokens are more than are known or drafted"
            raise ViolationError("I6", f"sequence {request.sequence_id}: {what}")


class ProgressWatch(Watcher):
    """Somebody always gets further than ever before, within as many steps as computing everything again may take."""

    def __init__(self, trace: Trace, rig: Rig) -> None:
        self._core, self._trace = rig.core, trace
        self._furthest: dict[int, int] = {}
        self._num_stuck = self._num_idle = 0

    def after_step(self, frame: Frame) -> None:
        live, moved = self._core.roster.live(), bool(frame.events)
        for one in live:
            reached = one.num_computed + one.num_output
            if reached > self._furthest.get(one.sequence_id, -1):
                self._furthest[one.sequence_id], moved = reached, True
        held = any(one.step <= frame.step < one.step + one.num_steps for one in self._trace.holds)
        self._num_stuck = 0 if moved or not live or held else self._num_stuck + 1
        self._num_idle = 0 if frame.batches or not self._num_stuck else self._num_idle + 1
        known = sum(len(one.token_ids) for one in live)
        if self._num_idle > PATIENCE or self._num_stuck > PATIENCE + 2 * known // self._trace.num_tokens:
            raise ViolationError("I8", f"{len(live)} sequences got no further in {self._num_stuck} steps")
