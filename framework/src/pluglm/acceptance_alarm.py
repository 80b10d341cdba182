"""Says in the log that a drafter's drafts are hardly ever kept: nothing else shows it, since the text is as it was."""

from __future__ import annotations

import logging

from pluglm.verification.counts import SpeculationCounts

logger = logging.getLogger("pluglm")

ENOUGH_DRAFTS = 500
LEAST_SHARE = 0.02


class AcceptanceAlarm:
    """Judges each stretch of ENOUGH_DRAFTS drafts or more, so a drafter that fails late is found too. One warning."""

    def __init__(self, drafter: str) -> None:
        """drafter: how to name it."""
        self._drafter = drafter
        self._counts, self._is_over = SpeculationCounts(), False

    def note(self, counts: SpeculationCounts) -> None:
        """Of one more request that ended."""
        if self._is_over or not counts.num_drafted:
            return
        self._counts += counts
        drafted, accepted = self._counts.num_drafted, self._counts.num_accepted
        if drafted < ENOUGH_DRAFTS:
            return
        self._counts = SpeculationCounts()
        if accepted < LEAST_SHARE * drafted:
            self._is_over = True
            logger.warning(
                "%s: %d of %d drafts were kept, which gains next to nothing; check that it was made for this model and "
                "drafts in its token ids, or set drafter=null, or drafter.adaptive=true where it has that key",
                self._drafter,
                accepted,
                drafted,
            )
