"""Strict priorities with ageing: preferences of the kernel's planner. Knows urgency and arrival, never KV or tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.duration import Seconds

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView

Rank = tuple[float, float, int]


class PriorityConfig(ComponentConfig):
    """ageing: the time since arrival that gains one level ("30s", "2m", seconds); 0 or None is off."""

    ageing: Seconds | None = None


class PriorityPolicy(SchedulingPolicy):
    """The lowest number goes first; within a level, arrival order.

    The effective level at time t is priority - (t - arrival) / ageing. All requests age at the same rate, so the order
    of two requests is that of priority + arrival / ageing and never changes while they live: a request overtakes
    one that is d levels more urgent exactly when that one arrived more than d * ageing later.

    A waiting request preempts, for a seat or for KV, running ones that are behind it both in that order and in their
    own level (equals never preempt each other to start, and an aged request is not thrown out by the urgent one that it
    overtook). A running request that needs KV takes it from any running one behind it in that order. Every victim is
    therefore behind its preemptor in one fixed total order, so two requests can never preempt each other in turn.
    """

    interface_version = 1
    Config = PriorityConfig

    def __init__(self, config: PriorityConfig, context: BuildContext) -> None:
        self._ageing_s = config.ageing or 0.0

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.running, key=self._rank)]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=self._rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """Victims as the class says, the last in order first; Stop when there is none, so nobody slips past."""
        behind = [other for other in view.running if self._rank(other) > self._rank(request)]
        if all(request.sequence_id != running.sequence_id for running in view.running):
            behind = [other for other in behind if other.priority > request.priority]
        behind.sort(key=self._rank, reverse=True)
        return Victims(tuple(other.sequence_id for other in behind)) if behind else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def _rank(self, request: RequestView) -> Rank:
        """Smaller is more deserving. Independent of the clock, so that no order ever flips."""
        aged = request.arrival_s / self._ageing_s if self._ageing_s else 0.0
        return request.priority + aged, request.arrival_s, request.sequence_id
