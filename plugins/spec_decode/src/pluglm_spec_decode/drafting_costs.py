"""What drafting takes, apart from verification: a round of drafts, and tokens that a drafter must catch up with."""

from __future__ import annotations

import statistics
from collections import deque

SAMPLES = 9
NEWEST = 1 / 64  # weight of a step's catching up, against that of all before it
FEW = 16  # tokens of each sequence that no drafter is thought to need extra time for


class DraftingCosts:
    """In the unit of the costs of steps. Zero until something is measured.

    A drafter that was not asked about a sequence for a while may have to compute what came since: a draft model, the
    whole prompt at first. That is paid once, so it is kept apart from what each round of drafts takes.
    `catching_up_time` is what comes of it in the long run, for each step that has drafts.
    """

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=SAMPLES)
        self._tokens: deque[float] = deque(maxlen=SAMPLES)
        self.round_time = self.token_time = self.catching_up_time = 0.0

    def note(self, num_rounds: int, num_behind: int, time: float) -> None:
        """num_rounds: drafts that were asked for, of the sequence with most. num_behind: tokens beyond FEW, of all."""
        if num_behind:
            self._tokens.append(max(0.0, time - num_rounds * self.round_time) / num_behind)
            self.token_time = statistics.median(self._tokens)
        else:
            self._rounds.append(time / num_rounds)
            self.round_time = statistics.median(self._rounds)
        self.catching_up_time += NEWEST * (num_behind * self.token_time - self.catching_up_time)
