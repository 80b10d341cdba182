"""Shortest job first: preferences of the kernel's planner. Knows sizes, nothing of KV blocks or tokens."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from pluglm.kernel.core import Event, RequestView, StepView
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims


class ShortestConfig(ComponentConfig):
    """queue_limit: a request that finds this many waiting is refused; None takes all."""

    queue_limit: int | None = Field(default=None, ge=1)


class ShortestPolicy(SchedulingPolicy):
    """The request with the fewest tokens in all (prompt and the most it may generate) goes first.

    Long requests wait as long as short ones keep coming. Sizes never change, so victims always lie behind whoever
    needs their room in one fixed order, and two requests cannot preempt each other in turn.
    """

    interface_version = 1
    Config = ShortestConfig

    def __init__(self, config: ShortestConfig, context: BuildContext) -> None:
        self._queue_limit = config.queue_limit

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        if self._queue_limit is not None and num_waiting >= self._queue_limit:
            return Reject(f"{num_waiting} requests wait already (queue_limit {self._queue_limit})")
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.running, key=_rank)]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=_rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request takes KV from longer ones, the longest first; a waiting one waits."""
        if all(request.sequence_id != other.sequence_id for other in view.running):
            return Stop()
        longer = sorted((other for other in view.running if _rank(other) > _rank(request)), key=_rank, reverse=True)
        return Victims(tuple(other.sequence_id for other in longer)) if longer else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""


def _rank(request: RequestView) -> tuple[int, float, int]:
    return request.num_prompt + request.max_new_tokens, request.arrival_s, request.sequence_id
