"""Plays a trace on an engine and asks the watchers after every step. Knows when things happen, not what is right."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trace_case import Arrival, Trace
from trace_parts import Rig, build_rig

from pluglm.kernel.core import Event, ModelInput, StepPlan, StepView
from pluglm.kernel.errors import RequestError

IDLE_S = 0.01  # how far the clock moves on in a step that computes nothing


class ViolationError(Exception):
    """An invariant does not hold: its name, and what was seen."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


@dataclass(slots=True)
class Frame:
    """What one step did. view and plan are None when nobody was there to plan for."""

    step: int
    view: StepView | None = None
    plan: StepPlan | None = None
    batches: list[ModelInput] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Watcher:
    """Told of everything in order; raises ViolationError. Any of these may be left out."""

    def arrived(self, arrival: Arrival, refused: str | None) -> None:
        """A request was queued, or refused with that message."""

    def cancelled(self, name: str, was_live: bool) -> None:
        """The caller gave up a request."""

    def reset(self) -> None:
        """The cache was told to forget."""

    def before_step(self, step: int) -> None:
        """Nothing has happened yet."""

    def writing(self, inputs: ModelInput) -> None:
        """The batch's copies are made, its tokens are not written."""

    def after_step(self, frame: Frame) -> None:
        """Once for every step."""

    def closing(self) -> None:
        """The engine is about to be closed, which gives up whoever is there."""

    def drained(self) -> None:
        """Everybody is gone."""


@dataclass(slots=True)
class Outcome:
    """How a trace went. violation: the first one, at that step. log: every decision, for comparing two runs."""

    violation: ViolationError | None = None
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    most_preemptions: int = 0
    log: list[Any] = field(default_factory=list)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)


def play(trace: Trace, watchers: Callable[[Trace, Rig], Sequence[Watcher]], rig: Rig | None = None) -> Outcome:
    """The whole trace up to its first violation. What the engine itself raises is one as well."""
    outcome = Outcome()
    rig = rig or build_rig(trace)
    player = _Player(trace, rig, watchers(trace, rig), outcome)
    with _warnings_kept(player.warnings):
        try:
            player.run()
        except ViolationError as violation:
            outcome.violation, outcome.step = violation, player.step
        except Exception as error:  # the engine promises to raise for nothing that a trace does
            outcome.violation = ViolationError("error", f"{type(error).__name__}: {error}")
            outcome.violation.__cause__ = error
            outcome.step = player.step
    return outcome


@contextmanager
def _warnings_kept(kept: list[str]) -> Iterator[None]:
    """The kernel's warnings go to the list and nowhere else."""
    logger, handler = logging.getLogger("pluglm"), _Keeper(kept)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


class _Keeper(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


class _Player:
    def __init__(self, trace: Trace, rig: Rig, watchers: Sequence[Watcher], outcome: Outcome) -> None:
        self.trace, self.rig, self.watchers, self.outcome = trace, rig, watchers, outcome
        self.step, self.warnings = 0, list[str]()
        self._batches: list[ModelInput] = []
        self._raised: list[ViolationError] = []
        self._faults = list(trace.faults)
        if hasattr(rig.backend, "about_to_write"):
            rig.backend.about_to_write, rig.backend.spoil = self._writing, self._spoil

    def run(self) -> None:
        while self.step <= self.trace.last_step or self.rig.core.roster.requests or self._is_held:
            if self.trace.closes is not None and self.step >= self.trace.closes:
                break
            self._before()
            self._one_step(self.rig.core.step)
            self.step = self._next()
        self._tell("closing")
        self._one_step(self.rig.core.close)
        self._tell("drained")

    @property
    def _is_held(self) -> bool:
        return any(one.step <= self.step < one.step + one.num_steps for one in self.trace.holds)

    def _next(self) -> int:
        """The next step; an empty engine waits for what comes."""
        if self.rig.core.roster.requests or self._is_held:
            return self.step + 1
        timed = [one.step for one in (*self.trace.arrivals, *self.trace.cancels, *self.trace.holds)]
        return min((one for one in (*timed, *self.trace.resets) if one > self.step), default=self.trace.last_step + 1)

    def _before(self) -> None:
        if self.trace.holds:
            self.rig.guard.settled = not self._is_held
        for reset in self.trace.resets:
            if reset == self.step:
                self.rig.reset_cache()
                self._tell("reset")
        for arrival in self.trace.arrivals:
            if arrival.step == self.step:
                self._tell("arrived", arrival, self._add(arrival))
        for cancel in self.trace.cancels:
            if cancel.step == self.step:
                self._tell("cancelled", cancel.name, self.rig.core.cancel(cancel.name))

    def _add(self, arrival: Arrival) -> str | None:
        try:
            self.rig.core.add(
                arrival.name,
                arrival.prompt,
                arrival.params(),
                priority=arrival.priority,
                tenant=arrival.tenant,
                deadline_s=arrival.deadline_s,
                salt=arrival.salt,
            )
        except RequestError as error:
            return str(error)
        return None

    def _one_step(self, step: Callable[[], list[Event]]) -> None:
        self._tell("before_step", self.step)
        self._batches.clear()
        started = self.rig.core.now()
        frame = Frame(self.step, events=step())
        for hook, arguments in self.rig.recorder.take():
            if hook == "step_planned":
                frame.view, frame.plan = arguments["view"], arguments["plan"]
        frame.batches = list(self._batches)
        if self._raised:
            raise self._raised[0]
        self._tell("after_step", frame)
        if self.warnings and not self._may_fail:
            raise ViolationError("error", self.warnings[0])
        self.warnings.clear()
        if self.rig.core.now() == started:
            self.rig.advance(IDLE_S)

    @property
    def _may_fail(self) -> bool:
        return bool(self.trace.faults) or self.trace.when_kv_full in ("refuse", "exit")

    def _tell(self, what: str, *arguments: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, what)(*arguments)

    def _writing(self, inputs: ModelInput) -> None:
        """Inside the guard, which would make a failure of the backend of what a watcher raises."""
        self._batches.append(inputs)
        try:
            self._tell("writing", inputs)
        except ViolationError as violation:
            self._raised.append(violation)

    def _spoil(self, inputs: ModelInput) -> tuple[str, int]:
        if not self._faults or self._faults[0].step > self.step:
            return "", 0
        fault = self._faults.pop(0)
        return fault.kind, fault.nth % len(inputs.segments)
