"""Counts who was overtaken, from one view to the next. Knows arrival and who waits, not why anyone was chosen."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from pluglm_schedulers.ranks import arrival, started_since

if TYPE_CHECKING:
    from pluglm.kernel.core import RequestView, StepView


class Overtakes:
    """How many later arrivals have left the queue while a request waited.

    Whoever left may have started and ended at once, so one that was cancelled counts too. One that waits anew is taken
    for overtaken as often as the next behind it, so that no count is above that of a request ahead.
    """

    def __init__(self) -> None:
        self._waiting: tuple[RequestView, ...] = ()
        self._counts: dict[int, int] = {}

    def count(self, request: RequestView) -> int:
        return self._counts.get(request.sequence_id, 0)

    def planning(self, view: StepView) -> None:
        """Called with the view of every step; again with the same one it changes nothing."""
        left = sorted(map(arrival, started_since(self._waiting, view)))
        counts: dict[int, int] = {}
        count_behind = 0
        for one in sorted(view.waiting, key=arrival, reverse=True):
            count = self._counts.get(one.sequence_id)
            if count is not None:
                count_behind = count + len(left) - bisect_right(left, arrival(one))
            counts[one.sequence_id] = count_behind
        self._counts, self._waiting = counts, view.waiting
