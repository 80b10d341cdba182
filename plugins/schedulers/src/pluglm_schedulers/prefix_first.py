"""Longest cached prefix first, within bounds: preferences of the kernel's planner. Knows what is cached and arrival.

Source of method: cache-aware scheduling of RadixAttention (Zheng et al., arXiv 2312.07104).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.duration import Seconds
from pluglm_schedulers.held_back import SharedPrompts
from pluglm_schedulers.overtakes import Overtakes
from pluglm_schedulers.ranks import arrival, behind, is_running
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class PrefixFirstConfig(ComponentConfig):
    """window: how many waiting requests, by arrival, are looked up in the cache; the others follow in arrival order.

    max_overtakes: later arrivals that may start before a request does. ageing: the age from which nothing overtakes a
    request ("30s", seconds); 0 or None is off. hold_back: a request waits while another one computes a prompt that goes
    on like its own for this many tokens after its cached prefix; 0 is off.
    """

    window: int = Field(default=128, ge=1)
    max_overtakes: int = Field(default=64, ge=0)
    ageing: Seconds | None = None
    hold_back: int = Field(default=32, ge=0)


class PrefixFirstPolicy(SchedulingPolicy):
    """Of the first `window` that wait, the one with the longest cached prefix goes first, then the others by arrival.

    While it waits, a request is overtaken by at most max_overtakes later arrivals: then, and when it is older than
    `ageing`, it goes before all of them. One that is held back for a prefix that is being computed, which it can adopt
    afterwards, counts as overtaken like any other. The next in order holds back all behind it.

    Running requests go by arrival, decodes before chunks of prompts, and a long one takes at most half of the rest
    while others want some. A running request that needs KV takes it from later arrivals, the latest first; one that
    waits never preempts.
    """

    interface_version = 1
    Config = PrefixFirstConfig

    def __init__(self, config: PrefixFirstConfig, context: BuildContext) -> None:
        self._window, self._shared = config.window, SharedPrompts(config.hold_back)
        self._max_overtakes, self._ageing_s = config.max_overtakes, config.ageing or float("inf")
        self._overtakes, self._shares = Overtakes(), StepShares()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        self._overtakes.planning(view)
        self._shared.planning(view)
        return self._shares.in_turn(view, sorted(view.running, key=arrival))

    def order_waiting(self, view: StepView) -> Iterator[int]:
        """Asks the cache only if a seat is free, since nobody starts otherwise."""
        arrived = sorted(view.waiting, key=arrival)
        if len(view.running) < view.budget.num_seats:
            return self._by_prefix(view, arrived)
        return (one.sequence_id for one in arrived)

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request: those after it, the latest first. A waiting one: Stop."""
        if not is_running(view, request):
            self._shares.blocked(view, request)
            return Stop()
        victims = tuple(other.sequence_id for other in behind(view, request, arrival))
        return Victims(victims) if victims else Stop()

    def on_event(self, event: Event) -> None:
        """Who was overtaken is read off the views."""

    def _by_prefix(self, view: StepView, arrived: list[RequestView]) -> Iterator[int]:
        looked_up = arrived[: self._window]
        cached = {one.sequence_id: one.cached_prefix() for one in looked_up}
        longest_first = sorted(looked_up, key=lambda one: -cached[one.sequence_id])  # equals stay in arrival order
        named: set[int] = set()
        oldest = 0  # in `arrived`: everyone before it is named
        for one in chain(longest_first, arrived[self._window :]):
            while oldest < len(arrived):
                first = arrived[oldest]
                if first.sequence_id not in named:
                    if not self._may_not_wait(view, first, len(named) - oldest):
                        break
                    named.add(first.sequence_id)
                    yield first.sequence_id
                oldest += 1
            num_cached = cached.get(one.sequence_id, 0)
            if one.sequence_id not in named and not self._shared.is_being_computed(one, num_cached):
                named.add(one.sequence_id)
                self._shared.let_in(one, num_cached)
                yield one.sequence_id

    def _may_not_wait(self, view: StepView, request: RequestView, overtaken_now: int) -> bool:
        overtaken = self._overtakes.count(request) + overtaken_now
        return overtaken >= self._max_overtakes or view.now_s - request.arrival_s > self._ageing_s
