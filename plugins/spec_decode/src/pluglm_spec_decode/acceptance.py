"""How often drafts are kept: by classes of confidence, over all sequences, and by what a sequence adds to that."""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 200  # drafts of a class that count; older ones fade
TRUST = 8  # drafts that what is assumed at first counts for, and what is left of a class when it is tried anew
RATE = 0.4  # by which a surprise moves a sequence, in log-odds
FADING = 0.995  # of what a sequence adds, each step: it is given another chance


class Acceptance:
    """The odds of a draft are those of its class, by all sequences, times a factor of its sequence.

    The factor is fitted step by step (logistic regression by stochastic gradient). Only drafts that were reached count:
    those behind a refused one say nothing.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        """priors: by class, what is assumed before any draft was verified; within (0, 1)."""
        self._kept = [TRUST * prior for prior in priors]
        self._reached = [float(TRUST)] * len(priors)
        self._added: dict[int, float] = {}  # by sequence, to the log-odds of all its drafts

    def survival(self, sequence_id: int, kinds: Sequence[int], least: float = 0.0) -> list[float]:
        """The chance that each draft and all before it are kept, by their classes; up to the first that is below least.

        Their sum is what the drafts are expected to add to a step.
        """
        factor, chance, found = math.exp(self._added.get(sequence_id, 0.0)), 1.0, []
        for kind in kinds:
            odds = factor * self._odds(kind)
            chance *= odds / (1 + odds)
            if chance < least:
                break
            found.append(chance)
        return found

    def share(self, kind: int) -> float:
        """Of the drafts of this class, over all sequences; old ones count for less."""
        return self._kept[kind] / self._reached[kind]

    def observe(self, sequence_id: int, kinds: Sequence[int], num_kept: int) -> None:
        """A step verified drafts of these classes and kept the first num_kept."""
        added = self._added.get(sequence_id, 0.0) * FADING
        if not kinds and not added:
            return
        for place, kind in enumerate(kinds[: num_kept + 1]):
            is_kept, odds = place < num_kept, math.exp(added) * self._odds(kind)
            added += RATE * (is_kept - odds / (1 + odds))
            self._reached[kind] += 1 - self._reached[kind] / MEMORY
            self._kept[kind] += is_kept - self._kept[kind] / MEMORY
        self._added[sequence_id] = added

    def doubt(self, kind: int) -> None:
        """What was counted long ago counts for little now."""
        fewer = min(1.0, TRUST / self._reached[kind])
        self._kept[kind] *= fewer
        self._reached[kind] *= fewer

    def release(self, sequence_id: int) -> None:
        self._added.pop(sequence_id, None)

    def _odds(self, kind: int) -> float:
        """Smoothed by a tenth of a draft, half of it kept: no chance is 0 or 1."""
        kept = self._kept[kind] + 0.05
        return kept / (self._reached[kind] + 0.1 - kept)
