"""I11: the order that each policy declares, from the plans alone. A policy that is not named here states no bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from trace_case import Trace
from trace_choices import OWN, schedulers
from trace_parts import Rig
from trace_play import Frame, ViolationError, Watcher

from pluglm.kernel.core import RequestView, StepPlan, StepView

Rank = Callable[[RequestView], tuple[float, ...]]


def arrival(one: RequestView) -> tuple[float, ...]:
    return one.arrival_s, one.sequence_id


def _aged(level: Callable[[RequestView], float], ageing_s: float | None) -> Rank:
    return lambda one: (level(one) + (one.arrival_s / ageing_s if ageing_s else 0.0), *arrival(one))


def start_order(trace: Trace) -> Rank | None:
    """In which order a policy starts those that wait, where it is a fixed one."""
    cls = schedulers()[trace.policy].cls
    config: Any = cls.Config(**trace.policy_config)
    if trace.policy == "fcfs":
        return arrival if not config.skip_blocked else None
    if trace.policy == "static_batch":
        return arrival
    if trace.policy == "priority":
        return _aged(lambda one: one.priority, config.ageing)
    if trace.policy == "shortest_first":
        return _aged(lambda one: one.num_prompt + one.max_new_tokens, config.ageing)
    if trace.policy == "deadline":
        return lambda one: (math.inf if one.deadline_s is None else one.deadline_s, *arrival(one))
    return None


def most_overtakes(trace: Trace) -> int | None:
    """Steps, or starts, in which somebody may be passed by later arrivals; None where that is not declared."""
    config: Any = schedulers()[trace.policy].cls.Config(**trace.policy_config)
    if trace.policy == "fcfs":
        return config.max_skips if config.skip_blocked else 0
    return config.max_overtakes if trace.policy == "prefix_first" else None


def may_start(view: StepView) -> list[RequestView]:
    """Those that wait for a seat. A lane of a search that has its logits waits for the other lanes."""
    return [one for one in view.waiting if one.num_pending]


VICTIMS_BY_ARRIVAL = ("fcfs", "fair", "prefix_first")  # nobody loses anything to a later arrival


class OrderWatch(Watcher):
    """Starts and victims against what the policies' docstrings promise."""

    def __init__(self, trace: Trace, rig: Rig) -> None:
        self._trace = trace
        self._rank, self._most = start_order(trace), most_overtakes(trace)
        choice = schedulers()[trace.policy]
        self._serves_decodes = choice.kind == "scheduling_policy" and choice.name not in OWN and not trace.holds
        self._passed: Counter[int] = Counter()
        self._batch: set[str] = set()
        self._have_run: set[str] = set()

    def after_step(self, frame: Frame) -> None:
        if frame.view is None or frame.plan is None:
            return
        running = {one.sequence_id for one in frame.view.running}
        started = {item.sequence_id for item in frame.plan.items} - running
        if started and self._rank is not None:
            self._check_starts(frame.view, started, self._rank)
        self._count_overtakes(frame.view, started)
        if self._serves_decodes:
            self._check_decodes(frame.view, frame.plan)
        self._have_run |= {one.request_id for one in frame.view.waiting if one.sequence_id in started}
        if self._trace.policy in VICTIMS_BY_ARRIVAL or self._trace.policy in ("shortest_first", "priority", "deadline"):
            self._check_victims(frame.view, frame.plan)
        if self._trace.policy == "static_batch":
            self._check_batch(frame.view, frame.plan, started)

    def _check_starts(self, view: StepView, started: set[int], rank: Rank) -> None:
        """Those that start are the first of those that wait."""
        judged = may_start(view)
        if self._trace.policy == "static_batch":  # further lanes belong to the batch of the first
            judged = [one for one in judged if one.request_id not in self._have_run]
        last = max((rank(one) for one in judged if one.sequence_id in started), default=())
        for one in judged:
            if one.sequence_id not in started and rank(one) < last:
                raise ViolationError(
                    "I11", f"{sorted(started)} start before sequence {one.sequence_id}, which is ahead"
                )

    def _count_overtakes(self, view: StepView, started: set[int]) -> None:
        if self._most is None:
            return
        starting = [one for one in view.waiting if one.sequence_id in started]
        still = [one for one in may_start(view) if one.sequence_id not in started]
        for one in still:
            later = sum(arrival(other) > arrival(one) for other in starting if other.request_id != one.request_id)
            self._passed[one.sequence_id] += min(later, 1) if self._trace.policy == "fcfs" else later
            if self._passed[one.sequence_id] > self._most:
                times = self._passed[one.sequence_id]
                raise ViolationError(
                    "I11", f"sequence {one.sequence_id} was passed {times} times, at most {self._most}"
                )
        waiting = {one.sequence_id for one in still}
        for sequence_id in [one for one in self._passed if one not in waiting]:
            del self._passed[sequence_id]

    def _check_decodes(self, view: StepView, plan: StepPlan) -> None:
        """The planner's promise: whoever has but its newest token to compute gets it, or gives up its place."""
        decodes = {one.sequence_id for one in view.running if one.num_known - one.num_computed == 1}
        served = {item.sequence_id for item in plan.items}
        gone = {*plan.preempted, *plan.offloaded, *plan.paused, *(one for one, _ in plan.refused)}
        starved = decodes - served - gone
        if starved and len(decodes) <= view.budget.num_tokens:
            raise ViolationError("I11", f"sequences {sorted(starved)} decode and get no token: {plan}")

    def _check_batch(self, view: StepView, plan: StepPlan, started: set[int]) -> None:
        """Nobody who runs is preempted; whoever starts beside others waited when the batch was taken."""
        running = {one.sequence_id for one in view.running}
        if lost := running & {*plan.preempted, *plan.offloaded, *plan.paused}:
            raise ViolationError("I11", f"static_batch preempts {sorted(lost)}, which run")
        if not running:
            self._batch = {one.request_id for one in view.waiting}
        late = [
            one.request_id for one in view.waiting if one.sequence_id in started and one.request_id not in self._batch
        ]
        if late:
            raise ViolationError("I11", f"{late} join a batch that was taken before they came")

    def _check_victims(self, view: StepView, plan: StepPlan) -> None:
        """The first of those that run, in the fixed order of the policy, loses neither seat nor KV to one behind it."""
        rank = arrival if self._trace.policy in VICTIMS_BY_ARRIVAL else self._rank
        if rank is None or not view.running:
            return
        lost = {*plan.preempted, *plan.offloaded, *plan.paused}
        first = min(view.running, key=rank)
        waiting_ahead = any(rank(one) < rank(first) for one in may_start(view))
        if first.sequence_id in lost and not waiting_ahead:
            raise ViolationError("I11", f"sequence {first.sequence_id} is ahead of all and loses its seat: {plan}")
