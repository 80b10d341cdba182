"""Schedulers that exist to disturb: one draws every answer, one preempts at every step. Repeatable for a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pluglm.kernel.core import StepPlan
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import (
    Accept,
    Need,
    Preemption,
    Reject,
    Scheduler,
    SchedulingPolicy,
    Skip,
    Stop,
    Victims,
)
from pluglm.kernel.planner import PolicyScheduler
from pluglm_schedulers.fcfs import FcfsConfig, FcfsPolicy

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget, Event, RequestView, StepView
    from pluglm.kernel.interfaces.kv import KVTransaction

MODES: tuple[Preemption, ...] = ("recompute", "offload", "pause")
OFTEN, SELDOM = 0.9, 0.02


class SeededConfig(ComponentConfig):
    """seed: of everything that is drawn."""

    seed: int = 0


def oldest(requests: Iterable[RequestView]) -> int | None:
    """The one that arrived first."""
    return min(((one.arrival_s, one.sequence_id) for one in requests), default=(0.0, None))[1]


class ChaosPolicy(SchedulingPolicy):
    """Draws order, shares, victims and modes. One rule keeps it from standing still for ever.

    The oldest running request is never a victim, and always names the others when it needs KV.
    """

    interface_version = 1
    Config = SeededConfig

    def __init__(self, config: SeededConfig, context: BuildContext) -> None:
        self._random, self._door = random.Random(config.seed), random.Random(config.seed + 1)

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Reject("bad luck") if self._door.random() < SELDOM else Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return self._some(view.running)

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return iter(self._some(view.waiting))

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._random.randint(1, tokens_left) if self._random.random() < OFTEN else 0

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        first = oldest(view.running)
        victims = [one.sequence_id for one in view.running if one.sequence_id not in (first, request.sequence_id)]
        self._random.shuffle(victims)
        if request.sequence_id != first:
            if self._random.random() < 0.5:
                return self._random.choice((Stop(), Skip()))
            victims = victims[:1]
        return Victims(tuple(victims), self._random.choice(MODES)) if victims else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def checkpoint(self) -> Callable[[], None]:
        return partial(self._random.setstate, self._random.getstate())

    def _some(self, requests: Iterable[RequestView]) -> list[int]:
        found = [one.sequence_id for one in requests if self._random.random() < OFTEN]
        self._random.shuffle(found)
        return found


class ForcedScheduler(Scheduler):
    """First come, first served, and everybody is preempted as soon as a token came of it. The mode is drawn."""

    interface_version = 1
    Config = SeededConfig

    def __init__(self, config: SeededConfig, context: BuildContext) -> None:
        self._random = random.Random(config.seed)
        self._policy = FcfsPolicy(FcfsConfig(), context)
        self._inner = PolicyScheduler(self._policy)
        self._output_at_start: dict[int, int] = {}

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        start = {one.sequence_id: one.num_output for one in view.waiting}
        for one in view.running:
            start[one.sequence_id] = self._output_at_start.get(one.sequence_id, one.num_output)
        self._output_at_start = start
        lost: dict[Preemption, list[int]] = {mode: [] for mode in MODES}
        staying = []
        for one in view.running:
            if one.num_output == start[one.sequence_id]:
                staying.append(one)
                continue
            mode = self._random.choice(MODES)
            lost[mode].append(one.sequence_id)
            if mode == "pause":
                kv.trim(one.sequence_id, one.num_computed)
            else:
                kv.release(one.sequence_id)
        plan = self._inner.plan(replace(view, running=tuple(staying)), budget, kv)
        return replace(
            plan,
            preempted=(*lost["recompute"], *plan.preempted),
            offloaded=(*lost["offload"], *plan.offloaded),
            paused=(*lost["pause"], *plan.paused),
        )

    def checkpoint(self) -> Callable[[], None]:
        restore_policy, state = self._policy.checkpoint(), self._random.getstate()
        output_at_start = self._output_at_start

        def restore() -> None:
            restore_policy()
            self._random.setstate(state)
            self._output_at_start = output_at_start

        return restore
