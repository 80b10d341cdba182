"""When a drafter whose drafts do not pay is not even asked: what a step may draft is then decided for many at once."""

from __future__ import annotations

MIN_IDLE = 8  # decisions in a row against all drafts, before the next ones are spared
STEPS = 15  # that are spared then; few beside the pauses between trials


class Resting:
    """Of drafters for which one step is like the next, as far as can be told before it. Ids are of the sequences."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._num_idle = 0
        self._num_left = 0
        self.num_rested = 0  # steps after that of the last decision

    def goes_on(self, ids: list[int]) -> bool:
        """Whether no decision is needed for the next step. It is, once, for other sequences: their drafts may pay."""
        if ids != self._ids:
            self._num_left = 0
        return self._num_left > 0

    def observed(self, sequence_id: int) -> None:
        """A step gave that sequence tokens; one of its sequences counts the steps."""
        if self._num_left and self._ids[:1] == [sequence_id]:
            self._num_left -= 1
            self.num_rested = STEPS - self._num_left

    def decided(self, ids: list[int], is_idle: bool) -> None:
        """What the decision for a step was; is_idle: there was a choice, and nothing was worth drafting or trying."""
        self.num_rested = 0
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._ids = ids
        self._num_left = 1 + STEPS if self._num_idle >= MIN_IDLE else 0  # the step of this decision comes first
