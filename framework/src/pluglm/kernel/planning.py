"""The plan of a step: asks the scheduler, validates, and makes the KV and the sequences agree with the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pluglm.kernel.core import BlockCopies, PlanItem, Sequence, Status, StepPlan, StepView
from pluglm.kernel.drawing import Drawer, Drawn, Window
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.kv import GroupTable
from pluglm.kernel.memory import Memory, Saved, StepKV
from pluglm.kernel.parts import Parts
from pluglm.kernel.plan_check import refuse_bad_items
from pluglm.kernel.roster import Roster

if TYPE_CHECKING:
    from pluglm.kernel.engine import EngineCore

logger = logging.getLogger("pluglm")
MAX_IDLE_STEPS = 100  # empty plans in a row, with work waiting, before the scheduler is called stuck


@dataclass(slots=True)
class Decision:
    """A scheduler's validated answer to a view, and then what its transaction did.

    held: tokens that each item's KV has room for. offloaded: by layer, blocks that were released.
    """

    view: StepView
    kv: StepKV
    plan: StepPlan
    reasons: list[str]
    copies: BlockCopies = ()
    held: list[int] = field(default_factory=list)
    offloaded: dict[int, tuple[GroupTable, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """What one step works on: the planned sequences, each with its token count, and the blocks to fill first."""

    items: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: BlockCopies = ()
    restores: list[tuple[tuple[GroupTable, ...], Saved]] = field(default_factory=list)
    searched: dict[Sequence, torch.Tensor] = field(default_factory=dict)  # next-token logits_V of lanes of a search

    @property
    def windows(self) -> list[Window]:
        """Those that reach the end of what is known, with the drafts that were computed along."""
        reach = [one.drafts_within(count) for one, count in self.items]
        pairs = zip(self.items, reach, strict=True)
        return [Window(sequence, tuple(sequence.drafts[:num])) for (sequence, _), num in pairs if num >= 0]


class Planning:
    """Plans step after step. stopped: why the engine takes no more requests, or nothing."""

    def __init__(self, parts: Parts, roster: Roster, memory: Memory, engine: EngineCore) -> None:
        self._parts, self._roster, self._memory, self._engine = parts, roster, memory, engine
        self._idle_steps = 0
        self.stopped = ""

    def plan(self, step_index: int) -> Guarded[Step]:
        """What this step works on; empty when the scheduler failed, which ended the requests it was asked about."""
        live = self._roster.live()
        if not live:
            self._idle_steps = 0
            return Step()
        decision = yield from self._choose(step_index, live)
        if decision is None:
            return Step()
        for reason in decision.reasons:
            logger.warning("%s: refused: %s", self._parts.names["scheduler"], reason)
        self._parts.hooks.call("step_planned", view=decision.view, plan=decision.plan)
        step = self._apply(decision)
        self._watch_progress(decision.plan)
        return step

    def meanwhile(self, step: Step, step_index: int) -> Callable[[], None] | None:
        """What to do while `step` is computed, before the one of that index: nothing."""

    def draw(self, drawer: Drawer, logits_RV: Any, windows: list[Window]) -> Guarded[list[tuple[Window, Drawn]]]:
        """What to commit of each window of the planned step. logits_RV: all their rows, if there are any."""
        return list(zip(windows, (yield from drawer.draw(logits_RV, windows)) if windows else (), strict=True))

    def _choose(self, step_index: int, live: list[Sequence]) -> Guarded[Decision | None]:
        """Ask the scheduler; None when it failed."""
        view = StepView(
            step=step_index,
            now_s=self._parts.runner.backend.now(),
            budget=self._parts.budget,
            running=self._roster.running_views(),
            waiting=self._roster.waiting_views(),
        )
        return self._memory.changing("scheduler", live, lambda kv: self._settled(self._ask(view, kv)))

    def _ask(self, view: StepView, transaction: Any) -> Decision:
        """Runs under the guard, as the next one; the engine's state does not change here."""
        kv: Any = StepKV(transaction, self._parts.names["kv"])
        if self._memory.kv.layout.groups:
            kv.advance(view)
        wanted = self._parts.scheduler.plan(view, view.budget, kv)
        return Decision(view, kv, *refuse_bad_items(wanted, view, kv, kv.adopted))

    def _settled(self, decision: Decision) -> Decision:
        decision.offloaded = {one: self._memory.layer_tables(one) for one in decision.plan.offloaded}
        decision.copies = decision.kv.commit()
        decision.held = [self._memory.held_tokens(item.sequence_id) for item in decision.plan.items]
        return decision

    def _apply(self, decision: Decision) -> Step:
        plan, live = decision.plan, {**self._roster.running, **self._roster.waiting}
        for item in plan.items:  # first of all: whoever ends below must give back what the transaction gave it
            live[item.sequence_id].holds_kv = True
        for sequence_id in (*plan.preempted, *plan.offloaded):  # and has nothing left to publish of what it took
            live[sequence_id].holds_kv = False
        for sequence_id, reason in plan.refused:
            live[sequence_id].holds_kv = False
            self._run_out(live[sequence_id], reason)
        for mode in ("preempted", "offloaded", "paused"):
            for sequence_id in getattr(plan, mode):
                if (sequence := live[sequence_id]).status is not Status.FINISHED:
                    self._preempt(sequence, mode == "paused", decision.offloaded.get(sequence_id))
        step = Step(copies=decision.copies)
        for item, held in zip(plan.items, decision.held, strict=True):
            self._start(item, held, decision.kv.adopted.get(item.sequence_id, 0), step)
        return step

    def _preempt(self, sequence: Sequence, keeps_kv: bool, tables: tuple[GroupTable, ...] | None) -> None:
        """Back to waiting, with its KV kept, copied to the host, or lost."""
        sequence.drafts, sequence.proposal = [], None
        sequence.num_preemptions += 1
        if not keeps_kv:
            sequence.holds_kv, sequence.num_published = False, 0
            if tables is None or not self._memory.offload(sequence, tables):
                sequence.num_recomputed += sequence.num_computed
                sequence.num_computed = sequence.num_sound = 0
            self._engine.forget_drafts(sequence)
        self._roster.wait(sequence)

    def _start(self, item: PlanItem, held: int, num_adopted: int, step: Step) -> None:
        """Put an item into the step; one whose KV the scheduler did not extend fails by the scheduler's name."""
        sequence = self._roster.running.get(item.sequence_id)
        if sequence is None and (sequence := self._roster.run(item.sequence_id)) is not None and num_adopted:
            self._memory.take_offloaded(sequence)
            sequence.num_computed = sequence.num_sound = sequence.num_published = num_adopted
            if sequence.num_preemptions:
                sequence.num_recomputed -= min(num_adopted, sequence.num_recomputed)
            else:
                sequence.num_cached = min(num_adopted, sequence.num_prompt)
        if sequence is None:  # it has ended
            return
        if num_adopted or not sequence.num_computed:
            sequence.kv_epoch = self._memory.cache_epoch
        needed = sequence.num_computed + item.num_tokens
        if held < needed:
            what = f"planned {needed} tokens of a sequence and extended its KV to {held}"
            self._engine.finish(sequence, "error", error=f"{self._parts.names['scheduler']} {what}")
            return
        if sequence.offloaded is not None and (saved := self._memory.take_offloaded(sequence)) is not None:
            step.restores.append((self._memory.layer_tables(item.sequence_id), saved))
        step.items.append((sequence, item.num_tokens))

    def _run_out(self, sequence: Sequence, reason: str) -> None:
        """A request that found no KV ends; or everything does, if the run was told to."""
        if not self._parts.limits.exits_when_full:
            self._engine.finish(sequence, "refused", error=reason)
            return
        self.stopped = reason
        self._engine.end_all("error", error=reason)

    def _watch_progress(self, plan: StepPlan) -> None:
        self._idle_steps = 0 if plan.items else self._idle_steps + 1
        if self._idle_steps and self._memory.held_back:  # the KV that is missing may come back
            self._parts.guard.wait_settled(1 / MAX_IDLE_STEPS)
        if self._idle_steps >= MAX_IDLE_STEPS:
            why = "while an abandoned call holds KV" if self._memory.held_back else "with work waiting"
            self._idle_steps = 0
            reason = f"{self._parts.names['scheduler']} planned nothing in {MAX_IDLE_STEPS} steps {why}"
            logger.warning("%s", reason)
            self._engine.end_all("error", error=reason)
