"""Whether loading beats recomputing, by what both took lately. Knows seconds and tokens, no tier and no tensor.

The rule: load a block when its tokens, at the tier's running mean of seconds a token, come sooner than at the running
mean of prefill. A mean moves by a quarter of the way with each measurement. What was never measured wins: a tier for a
few blocks only, which measures it. A tier that lost often in a row is measured anew, since it may be faster now.
"""

from __future__ import annotations

WEIGHT = 0.25  # of a new measurement
TRIAL_BLOCKS = 4  # that are loaded of a tier to measure it
LOSSES = 32  # in a row, before a tier is measured anew


class Mean:
    """An exponential moving mean of seconds a token; None before the first measurement."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        new, old = max(0.0, seconds) / num_tokens, self.seconds_per_token
        self.seconds_per_token = new if old is None else old + WEIGHT * (new - old)


class Costs:
    """Means of prefill and of every tier."""

    def __init__(self) -> None:
        self.prefill = Mean()
        self._tiers: dict[str, Mean] = {}
        self._losses: dict[str, int] = {}

    def loaded(self, tier: str, num_tokens: int, seconds: float) -> None:
        self._tiers.setdefault(tier, Mean()).add(num_tokens, seconds)
        self._losses[tier] = 0

    def computed(self, num_tokens: list[int], block_size: int, seconds: float) -> None:
        """A step with that many tokens of each sequence. It counts as prefill when most of it is chunks of a block."""
        total = sum(num_tokens)
        if 2 * sum(count for count in num_tokens if count >= block_size) > total:
            self.prefill.add(total, seconds)

    def most_blocks(self, tier: str) -> int | None:
        """How many blocks of one hit are worth loading: all (None), none, or a few to learn it."""
        mean = self._tiers.get(tier)
        if mean is None or mean.seconds_per_token is None:
            return TRIAL_BLOCKS
        recomputing = self.prefill.seconds_per_token
        return None if recomputing is None or mean.seconds_per_token < recomputing else 0

    def lost(self, tier: str) -> None:
        """It had a block that was not worth loading."""
        self._losses[tier] = self._losses.get(tier, 0) + 1
        if self._losses[tier] >= LOSSES:
            self._tiers.pop(tier, None)
            self._losses[tier] = 0
