"""Shortest remaining work first, with ageing: preferences of the kernel's planner. Knows sizes and arrival, never KV.

Source of method: Schrage, "A proof of the optimality of the shortest remaining processing time discipline" (1968); the
work of a request is the most that it may still need, since nobody knows where a text ends.
"""

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


class ShortestFirstConfig(ComponentConfig):
    """ageing: the time since arrival that makes up for one token of work ("100ms", seconds); 0 or None is off."""

    ageing: Seconds | None = 0.1


class ShortestFirstPolicy(SchedulingPolicy):
    """The request with the least work left goes first; ties by arrival, then sequence id.

    Work left is counted in tokens: known ones not computed yet, and those still wanted. One that waits ranks by its
    whole work (most have computed nothing, and those preempted start again), so its rank, whole work + arrival /
    ageing, never changes: requests of W tokens overtake an older one of L tokens only while they arrive less than
    (L - W) * ageing after it, and nobody starves. The one at the head holds back all behind it until its KV is free.

    Running ones share a step's tokens by work left, which falls as they run: decodes before chunks of prompts, and a
    prompt leaves half of the rest to waiting ones with less work, if seats are free. What they take from each other
    does not follow it: a victim is behind in the rank that it was admitted by, a fixed total order, so two requests
    never preempt each other in turn and the first of that order always keeps what it has. Of those behind, the one with
    the most work left goes first. One that waits never preempts.
    """

    interface_version = 1
    Config = ShortestFirstConfig

    def __init__(self, config: ShortestFirstConfig, context: BuildContext) -> None:
        self._ageing_s = config.ageing or 0.0
        self._shares = StepShares()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return self._shares.by_rank(view, self._left_rank)

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=self._rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request: those behind it in the fixed order, most work left first. A waiting one: Stop."""
        if not is_running(view, request):
            self._shares.blocked(view, request)
            return Stop()
        victims = sorted(behind(view, request, self._rank), key=self._left_rank, reverse=True)
        return Victims(tuple(other.sequence_id for other in victims)) if victims else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def checkpoint(self) -> Callable[[], None]:
        return self._shares.checkpoint()

    def _rank(self, request: RequestView) -> Rank:
        """Smaller is more deserving. Independent of the clock and of progress."""
        return self._aged(request, request.num_prompt + request.max_new_tokens)

    def _left_rank(self, request: RequestView) -> Rank:
        to_compute = request.num_known - request.num_computed
        return self._aged(request, to_compute + request.max_new_tokens - request.num_output)

    def _aged(self, request: RequestView, work: int) -> Rank:
        aged = request.arrival_s / self._ageing_s if self._ageing_s else 0.0
        return work + aged, request.arrival_s, request.sequence_id
