"""First come, first served: preferences of the kernel's planner. Knows arrival order; knows nothing of priorities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class FcfsPolicy(SchedulingPolicy):
    """Requests are served in arrival order, ties by sequence id.

    A waiting request that cannot start holds back all behind it, so a large one never starves. A running request that
    needs KV takes it from those that arrived after it, the latest first; nobody loses a seat or KV to a later arrival.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        pass

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.running, key=_rank)]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=_rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request: those after it, the latest first. A waiting one: Stop."""
        if all(request.sequence_id != running.sequence_id for running in view.running):
            return Stop()
        behind = sorted((other for other in view.running if _rank(other) > _rank(request)), key=_rank, reverse=True)
        return Victims(tuple(other.sequence_id for other in behind)) if behind else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""


def _rank(request: RequestView) -> tuple[float, int]:
    return request.arrival_s, request.sequence_id
