"""When a drafter whose drafts do not pay is not even asked: what a step may draft is then decided for many at once."""

from __future__ import annotations

MIN_IDLE = 8  # decisions in a row against all drafts, before the next ones are spared
STEPS = 15  # that are spared then; few beside the pauses between trials


class Resting:
    """Of drafters for which one step is like the next, as far as can be told before it. Ids are of the sequences.

    is_on: the step that was last asked about is one of a rest. num_rested: steps of the rest so far.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.num_rested = 0
        self._ids: list[int] = []
        self._num_idle = 0
        self._num_left = 0
        self._is_over = False  # the step that was last asked about had an outcome

    def spares(self, ids: list[int]) -> bool:
        """Whether the step that is to come needs no decision. Asked twice before an outcome, it is the same step.

        For other sequences there is a decision, once: their drafts may pay.
        """
        if ids != self._ids:
            self.is_on, self._num_left = False, 0
        elif self._is_over:
            self.is_on = self._num_left > 0
            if self.is_on:
                self._num_left -= 1
                self.num_rested += 1
        self._is_over = False
        return self.is_on

    def observed(self) -> None:
        """The step gave tokens."""
        self._is_over = True

    def decided(self, ids: list[int], is_idle: bool) -> None:
        """What the decision for a step was; is_idle: there was a choice, and nothing was worth drafting or trying."""
        self.num_rested = 0
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._ids = ids
        self._num_left = STEPS if self._num_idle >= MIN_IDLE else 0
