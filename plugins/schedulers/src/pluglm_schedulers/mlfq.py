"""Multi-level feedback queue: preferences of the kernel's planner. Knows service received and time, never KV or sizes.

Source of method: Corbato et al., "An Experimental Time-Sharing System" (1962); for text generation, FastServe (Wu et
al., arXiv 2305.05920), whose entry at a level by prompt length is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Preemption, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.duration import Seconds
from pluglm_schedulers.ranks import behind, is_running
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class MlfqConfig(ComponentConfig):
    """quanta: tokens of service at each level from the top; below them is a last level without an end.

    boost: the time after which everybody returns to the top ("10s", seconds); 0 or None is never. preemption: what
    becomes of those that lose a seat; whoever loses KV computes again.
    """

    quanta: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(64, 256, 1024), min_length=1)
    boost: Seconds | None = 10.0
    preemption: Preemption = "pause"


class MlfqPolicy(SchedulingPolicy):
    """The higher level goes first; within a level, arrival order, ties by sequence id. Decodes come before prompts.

    A sequence starts at the top and falls a level whenever it has used up the quantum of its own. Its service is the
    most tokens that it was ever seen with, computed and emitted, so computing again after a preemption is free; a
    cached prefix counts as if it were computed. A prompt leaves half of a step's prompt tokens to waiting ones ahead.

    Whoever waits preempts running ones of strictly lower levels, the last in order first; a running request takes KV
    from any behind it. Two sequences change places only when one of them has used up a quantum of new tokens, so
    between two boosts they do not take turns at preempting each other more often than there are quanta.

    Every boost puts all at the top, in arrival order. Those that arrive later are behind, so whoever waits then is
    overtaken no more than by earlier arrivals, until they have used the first quantum or ended: nobody waits for ever.
    The next in order holds back all behind it.
    """

    interface_version = 1
    Config = MlfqConfig

    def __init__(self, config: MlfqConfig, context: BuildContext) -> None:
        self._ends = tuple(accumulate(config.quanta))
        self._boost_s, self._preemption = config.boost or 0.0, config.preemption
        self._boosted_s: float | None = None
        self._service: dict[int, tuple[int, int]] = {}  # sequence id -> tokens in all, and those before the last boost
        self._shares = StepShares()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        self._see(view)
        return self._shares.by_rank(view, self._rank)

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=self._rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """Victims as the class says, the last in order first; Stop when there is none, so nobody slips past."""
        victims = behind(view, request, self._rank)
        if not is_running(view, request):
            victims = [other for other in victims if self._level(other) > self._level(request)]
            if not victims:
                self._shares.blocked(view, request)
        mode = self._preemption if need == "seat" else "recompute"
        return Victims(tuple(other.sequence_id for other in victims), mode) if victims else Stop()

    def on_event(self, event: Event) -> None:
        """Service is read off the views, and whoever is in none of them is forgotten."""

    def _see(self, view: StepView) -> None:
        if self._boosted_s is None:
            self._boosted_s = view.now_s
        boost = 0 < self._boost_s <= view.now_s - self._boosted_s
        if boost:
            self._boosted_s = view.now_s
        service = {}
        for one in (*view.running, *view.waiting):
            most, before = self._service.get(one.sequence_id, (0, 0))
            most = max(most, one.num_computed + one.num_output)
            service[one.sequence_id] = most, most if boost else before
        self._service = service

    def _level(self, request: RequestView) -> int:
        """0 is the top."""
        most, before = self._service.get(request.sequence_id, (0, 0))
        return bisect_right(self._ends, most - before)

    def _rank(self, request: RequestView) -> tuple[int, float, int]:
        return self._level(request), request.arrival_s, request.sequence_id
