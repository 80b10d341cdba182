"""Planning that asks the scheduler about the next step while a device computes this one.

The step is foreseen as the one that comes if everybody goes on: every sequence has computed what it was planned and,
behind its last known token, one token more. Its plan stands only if it came so, in all that a plan may depend on; else
it is taken back, and the step is planned as it is without this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pluglm.kernel.core import RequestView, Sequence, StepView
from pluglm.kernel.guard import Guarded, Watched
from pluglm.kernel.planning import Decision, Planning, Step
from pluglm.kernel.roster import view_of

if TYPE_CHECKING:
    from pluglm.kernel.engine import EngineCore
    from pluglm.kernel.interfaces.kv import KVTransaction
    from pluglm.kernel.interfaces.scheduler import PlansAhead
    from pluglm.kernel.memory import Memory
    from pluglm.kernel.parts import Parts
    from pluglm.kernel.roster import Roster


@dataclass(slots=True)
class _Foreseen:
    """A step before its time. undo: takes the asking back; decision or error: what came of it."""

    view: StepView
    undo: Callable[[], object] = tuple
    held: KVTransaction | None = None
    decision: Decision | None = None
    error: BaseException | None = None


class AheadPlanning(Planning):
    """The kernel's Planning, with plans made ahead where one can be. scheduler: the one of the parts, or its policy.

    The parts need a LaunchingBackend and an AheadKV. kept, dropped: how many plans ahead stood, and how many did not.
    """

    def __init__(
        self, parts: Parts, roster: Roster, memory: Memory, engine: EngineCore, *, scheduler: PlansAhead
    ) -> None:
        super().__init__(parts, roster, memory, engine)
        self._kv: Any = parts.runner.kv
        self._scheduler = scheduler
        self._foreseen: _Foreseen | None = None
        self.kept = self.dropped = 0

    def meanwhile(self, step: Step, step_index: int) -> Callable[[], None] | None:
        """Plans the step of that index, under the guard of the one that is computed; None where it will come otherwise.

        So it does when somebody reaches max_tokens, and where a search or drafts decide who goes on.
        """
        for sequence, _ in step.items:
            is_last = sequence.num_output + 1 >= sequence.request.max_new_tokens
            if is_last or sequence.walk is not None or sequence.drafts:
                return None
        return partial(self._foresee, dict(step.items), step_index) if step.items else None

    def _foresee(self, counts: Mapping[Sequence, int], step_index: int) -> None:
        """What fails here is a failure of that step, if it comes, and not of the one that is computed."""
        guard, names = self._parts.guard, self._parts.names
        foreseen = _Foreseen(self._next_view(counts, step_index))
        outer, guard.active = guard.active, names["scheduler"]
        try:
            foreseen.held = self._kv.hold()
            foreseen.undo = self._scheduler.checkpoint()
            foreseen.decision = self._ask(foreseen.view, Watched(foreseen.held, guard, names["kv"]))
        except BaseException as error:
            foreseen.error = guard.explain(error)
        guard.active = outer
        if self._kv.holds(foreseen.held):  # else this call was given up, and the engine has gone on without it
            self._foreseen = foreseen

    def _next_view(self, counts: Mapping[Sequence, int], step_index: int) -> StepView:
        running = tuple(_going_on(one, counts.get(one, 0)) for one in self._roster.running.values())
        now_s, waiting = self._parts.runner.backend.now(), self._roster.waiting_views()
        return StepView(step=step_index, now_s=now_s, budget=self._parts.budget, running=running, waiting=waiting)

    def _choose(self, step_index: int, live: list[Sequence]) -> Guarded[Decision | None]:
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            if self._came(foreseen.view, step_index) and self._kv.holds(foreseen.held):
                self._kv.let_go()
                self.kept += 1
                return (yield from self._keep(foreseen, live))
            self.dropped += 1
            undo = foreseen.undo
            if (yield from self._engine.attempting("scheduler", live, lambda: (undo(),))) is None:
                return None
        return (yield from super()._choose(step_index, live))

    def _came(self, view: StepView, step_index: int) -> bool:
        """Whether a view made now would be that one, but for the clock."""
        running = self._roster.running
        return (
            view.step == step_index
            and len(view.running) == len(running)
            and all(map(_is_as_seen, view.running, running.values()))
            and view.waiting == self._roster.waiting_views()
        )

    def _keep(self, foreseen: _Foreseen, live: list[Sequence]) -> Guarded[Decision | None]:
        """The decision, its transaction committed; or the failure that asking ahead ended with."""

        def settle() -> Decision:
            if foreseen.decision is None:
                raise foreseen.error or RuntimeError("a plan ahead has neither an answer nor an error")
            foreseen.decision.view = replace(foreseen.view, now_s=self._parts.runner.backend.now())
            return self._settled(foreseen.decision)

        def roll_back() -> None:
            if foreseen.held is not None:
                with suppress(RuntimeError):  # an abandoned call may have closed it
                    foreseen.held.rollback()

        undo = partial(self._engine.attempt, "kv", (), roll_back)
        return (yield from self._engine.attempting("scheduler", live, settle, undo))


def _going_on(sequence: Sequence, count: int) -> RequestView:
    """The view of a running sequence once `count` more tokens are computed, with one drawn if none is known by then."""
    view = view_of(sequence, None)
    is_drawn = count > 0 and sequence.drafts_within(count) >= 0
    return replace(
        view,
        num_computed=view.num_computed + count,
        num_known=view.num_known + is_drawn,
        num_output=view.num_output + is_drawn,
    )


def _is_as_seen(view: RequestView, sequence: Sequence) -> bool:
    """In all that can change while a sequence keeps its seat."""
    return (
        view.sequence_id == sequence.sequence_id
        and view.num_computed == sequence.num_computed
        and view.num_known == len(sequence.token_ids)
        and not sequence.drafts
    )
