"""Strict priorities with ageing: preferences of the kernel's planner. Knows urgency and arrival, never KV or tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.duration import Seconds
from pluglm_schedulers.ranks import behind, is_running
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView

Rank = tuple[float, float, int]


class PriorityConfig(ComponentConfig):
    """ageing: the time since arrival that gains one level ("30s", "2m", seconds); 0 or None is off."""

    ageing: Seconds | None = None


class PriorityPolicy(SchedulingPolicy):
    """The lowest number goes first; within a level, arrival order. Decodes are served before chunks of prompts.

    The effective level at time t is priority - (t - arrival) / ageing. All requests age at the same rate, so the order
    of two requests is that of priority + arrival / ageing and never changes while they live: a request overtakes
    one that is d levels more urgent exactly when that one arrived more than d * ageing later.

    A waiting request preempts, for a seat or for KV, running ones that are behind it both in that order and in their
    own level (equals never preempt each other to start, and an aged request is not thrown out by the urgent one that it
    overtook). A running request that needs KV takes it from any running one behind it in that order. Every victim is
    therefore behind its preemptor in one fixed total order, so two requests can never preempt each other in turn.

    A prompt that runs leaves half of a step's prompt tokens to waiting ones that are ahead of it, if seats are free.
    """

    interface_version = 1
    Config = PriorityConfig

    def __init__(self, config: PriorityConfig, context: BuildContext) -> None:
        self._ageing_s = config.ageing or 0.0
        self._shares = StepShares()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return self._shares.by_rank(view, self._rank)

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=self._rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """Victims as the class says, the last in order first; Stop when there is none, so nobody slips past."""
        victims = behind(view, request, self._rank)
        if not is_running(view, request):
            victims = [other for other in victims if other.priority > request.priority]
            if not victims:
                self._shares.blocked(view, request)
        return Victims(tuple(other.sequence_id for other in victims)) if victims else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def checkpoint(self) -> Callable[[], None]:
        return self._shares.checkpoint()

    def _rank(self, request: RequestView) -> Rank:
        """Smaller is more deserving. Independent of the clock, so that no order ever flips."""
        aged = request.arrival_s / self._ageing_s if self._ageing_s else 0.0
        return request.priority + aged, request.arrival_s, request.sequence_id
