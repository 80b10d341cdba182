"""Fair shares of service between tenants: preferences of the kernel's planner. Counts tokens, never KV or time.

Source of method: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.ranks import arrival, behind, is_running
from pluglm_schedulers.service_counters import ServiceCounters
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class FairConfig(ComponentConfig):
    """What a token costs its tenant: input_weight one of the prompt, output_weight one that was generated."""

    input_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    output_weight: float = Field(default=2.0, gt=0, allow_inf_nan=False)


class FairPolicy(SchedulingPolicy):
    """The tenant that was served least goes first; within a tenant, and between equals, arrival order.

    While two tenants both have requests waiting, what they are served differs by at most
    2 * max(input_weight * longest prompt, output_weight * tokens that run at once) (theorem 4.4 of the paper), as long
    as nobody is preempted; computing a preempted request again costs its tenant nothing. Of running requests, decodes
    come before chunks of prompts, and a long prompt takes at most half of the rest while others want some. The next in
    order holds back all behind it. Preemption follows arrival alone, a fixed order, so that two requests never preempt
    each other in turn: a running request that needs KV takes it from later arrivals, those of the most served tenant
    first.
    """

    interface_version = 1
    Config = FairConfig

    def __init__(self, config: FairConfig, context: BuildContext) -> None:
        self._input_weight = config.input_weight
        self._counters = ServiceCounters(config.input_weight, config.output_weight)
        self._shares = StepShares()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        self._counters.arrived(request)
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        self._counters.planning(view)
        return self._shares.in_turn(view, sorted(view.running, key=self._rank))

    def order_waiting(self, view: StepView) -> Iterator[int]:
        """Lazy: each request pulled counts as started, with its prompt on its tenant's account, before the next."""
        queues: dict[str, list[RequestView]] = {}
        for request in sorted(view.waiting, key=arrival, reverse=True):
            queues.setdefault(request.tenant, []).append(request)
        service = {tenant: self._counters.service(tenant) for tenant in queues}
        while queues:
            tenant = min(queues, key=lambda one: (service[one], arrival(queues[one][-1])))
            request = queues[tenant].pop()
            service[tenant] += self._input_weight * self._counters.prompt_due(request)
            if not queues[tenant]:
                del queues[tenant]
            yield request.sequence_id

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request: later arrivals, the most served tenant's first. A waiting one: Stop."""
        if not is_running(view, request):
            self._shares.blocked(view, request)
            return Stop()
        victims = sorted(behind(view, request, arrival), key=self._rank, reverse=True)
        return Victims(tuple(other.sequence_id for other in victims)) if victims else Stop()

    def on_event(self, event: Event) -> None:
        self._counters.happened(event)

    def _rank(self, request: RequestView) -> tuple[float, float, int]:
        return self._counters.service(request.tenant), *arrival(request)
