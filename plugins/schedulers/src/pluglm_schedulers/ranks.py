"""Orders over requests, and who is behind whom in one. Knows views; asks for nothing but a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluglm.kernel.core import RequestView, StepView

Rank = Callable[["RequestView"], Any]

arrival: Callable[[RequestView], tuple[float, int]] = attrgetter("arrival_s", "sequence_id")


def started_since(waited: Iterable[RequestView], view: StepView) -> list[RequestView]:
    """Of those that waited in an earlier view, who is gone from this one's queue, or ran and waits again.

    A lane of a search runs for one step and then waits for the other lanes.
    """
    computed = {one.sequence_id: one.num_computed for one in view.waiting}
    return [one for one in waited if computed.get(one.sequence_id, one.num_computed + 1) > one.num_computed]


def is_running(view: StepView, request: RequestView) -> bool:
    """Whether it has a seat; a waiting one may hold KV as well, when it is paused or was forked."""
    return any(request.sequence_id == running.sequence_id for running in view.running)


def behind(view: StepView, request: RequestView, rank: Rank) -> list[RequestView]:
    """Running requests that rank after this one, the last first. One that waits is nobody's victim."""
    mine = rank(request)
    found = [other for other in view.running if rank(other) > mine]
    found.sort(key=rank, reverse=True)
    return found
