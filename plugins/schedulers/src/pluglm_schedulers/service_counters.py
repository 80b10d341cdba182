"""Virtual token counters: what each tenant has been served, in weighted tokens. Knows requests by their views.

Source: algorithm 2 of Sheng et al. (arXiv 2401.00588). A prompt is charged whole when its request starts, output as it
comes; a tenant that had nothing waiting is lifted to the level of those that have, so idleness saves up no credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


@dataclass(slots=True)
class _Live:
    """A request between its arrival and its last event. is_new until the first plan that sees it."""

    tenant: str
    num_prompt: int
    is_new: bool = True
    charged: bool = False


class ServiceCounters:
    """Counts requests that arrived through `arrived`; others are nobody's. Views change nothing when seen again.

    Memory: one entry for each live request, and one for each tenant that has one or stands above the level, at which
    any other would start again.
    """

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self._live: dict[str, _Live] = {}
        self._service: dict[str, float] = {}
        self._queued: set[str] = set()  # tenants with something waiting
        self._last = ""  # the tenant that left the queue last
        self._level = 0.0  # the least service of those queued; that of the last to leave when there are none

    def arrived(self, request: RequestView) -> None:
        self._live[request.request_id] = _Live(request.tenant, request.num_prompt)

    def service(self, tenant: str) -> float:
        return self._service.get(tenant, 0.0)

    def prompt_due(self, request: RequestView) -> int:
        """Prompt tokens that starting this request would charge: none when it ran before or was never announced."""
        live = self._live.get(request.request_id)
        return 0 if live is None or live.charged else live.num_prompt

    def planning(self, view: StepView) -> None:
        """Charge what has started since the last plan, lift what has come, forget who needs no counter."""
        for request in view.running:
            if (live := self._live.get(request.request_id)) is not None:
                self._charge_prompt(live)
        waiting = [live for one in view.waiting if (live := self._live.get(one.request_id)) is not None]
        self._set_queued({live.tenant for live in waiting if not live.is_new})
        for live in waiting:
            if live.is_new and live.tenant not in self._queued:
                self._service[live.tenant] = max(self.service(live.tenant), self._level)
                self._set_queued(self._queued | {live.tenant})
            live.is_new = False
        self._forget()

    def happened(self, event: Event) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        if event.token_ids:
            self._charge_prompt(live)
            self._charge(live.tenant, self._output_weight * len(event.token_ids))
        if event.finish_reason is not None:
            del self._live[event.request_id]

    def _charge_prompt(self, live: _Live) -> None:
        if not live.charged:
            live.charged, live.is_new = True, False
            self._charge(live.tenant, self._input_weight * live.num_prompt)

    def _charge(self, tenant: str, cost: float) -> None:
        self._service[tenant] = self.service(tenant) + cost

    def _set_queued(self, queued: set[str]) -> None:
        """Of several that left in one step the most served is taken for the last: the least served is picked first."""
        if self._queued and not queued:
            self._last = max(self._queued, key=lambda tenant: (self.service(tenant), tenant))
        self._queued = queued
        self._level = max(self._level, min(map(self.service, queued), default=self.service(self._last)))

    def _forget(self) -> None:
        active = {live.tenant for live in self._live.values()}
        above = (one for one, service in self._service.items() if one in active or service > self._level)
        self._service = {tenant: self._service[tenant] for tenant in above}
