"""What a step with drafts costs against one without: measured on a clock, or a fixed share for each draft."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise
from typing import Protocol

SAMPLES = 9  # medians are of the latest so many
MIN_SAMPLES = 3  # a single step may have computed a long prompt as well
FRESH_STEPS = 512  # what was not seen for so long is forgotten, and so tried again
PLAIN_EVERY = 64  # steps at most between two measurements without drafts
NEWEST = 0.05  # weight of a step's speed against all before it
ASSUMED_COST = 0.1  # of a draft, until something is measured


class StepCosts(Protocol):
    """Relative costs of steps."""

    def ratio(self, num_sequences: int, num_drafts: int) -> float:
        """Time of a step in which each of num_sequences has num_drafts, over that of a step without drafts."""
        ...

    def speed(self, num_sequences: int) -> float | None:
        """Tokens that a sequence of such a batch gets in the time of a step without drafts; None: it is not known."""
        ...


class FixedCosts:
    """Every draft of a sequence adds the same share of a plain step."""

    def __init__(self, draft_cost: float) -> None:
        self._draft_cost = draft_cost

    def ratio(self, num_sequences: int, num_drafts: int) -> float:
        return 1 + self._draft_cost * num_drafts

    def speed(self, num_sequences: int) -> None:
        return None


class MeasuredCosts:
    """Medians of step times by the size of the batch and the drafts in it, and straight lines between them.

    Batches whose sizes are within about a quarter of each other share what was measured.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, dict[int, _Level]] = {}  # by size of the batch, then by number of drafts, roughly
        self._speeds: dict[int, float] = {}
        self._step = 0

    def ratio(self, num_sequences: int, num_drafts: int) -> float:
        """1 or more. A size without measurements takes those of the nearest; without any, a draft adds ASSUMED_COST."""
        size = _size(num_sequences)
        known = [one for one, levels in self._sizes.items() if _is_known(levels)]
        if not known:
            return 1 + ASSUMED_COST * num_drafts
        levels = self._sizes[min(known, key=lambda one: (abs(one - size), one))]
        plain_s = levels[0].seconds
        found = [
            (one.drafts, max(1.0, one.seconds / plain_s)) for one in levels.values() if one.is_sound and one.drafts
        ]
        return _interpolated([(0.0, 1.0), *sorted(found)], num_drafts)

    def speed(self, num_sequences: int) -> float | None:
        return self._speeds.get(_size(num_sequences))

    def wants_plain(self, num_sequences: int) -> bool:
        """Whether the next step of so many should have no drafts: only then is it known what those cost."""
        levels = self._sizes.get(_size(num_sequences), {})
        if not any(level.is_sound for place, level in levels.items() if place):
            return False
        plain = levels.get(0)
        return plain is None or not plain.is_sound or self._step - plain.last_step >= PLAIN_EVERY

    def note(self, num_sequences: int, num_drafts: int, seconds: float, num_committed: int = 0) -> None:
        """A step of so many sequences, with num_drafts in all, took so long. num_committed: tokens of all, if known."""
        self._step += 1
        size = _size(num_sequences)
        levels = self._sizes.setdefault(size, {})
        if num_committed and _is_known(levels):
            speed, before = num_committed / num_sequences * levels[0].seconds / seconds, self._speeds.get(size, 1.0)
            self._speeds[size] = before + NEWEST * (speed - before)
        place = num_drafts.bit_length()
        levels.setdefault(place, _Level()).add(num_drafts / num_sequences, seconds, self._step)
        for place, level in list(levels.items()):
            if self._step - level.last_step > FRESH_STEPS:
                del levels[place]


class _Level:
    """Step times of one size with about the same number of drafts: medians of drafts a sequence, and of seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self.last_step = 0
        self.drafts = self.seconds = 0.0

    @property
    def is_sound(self) -> bool:
        return len(self._samples) >= MIN_SAMPLES

    def add(self, drafts: float, seconds: float, step: int) -> None:
        self._samples.append((drafts, seconds))
        self.drafts, self.seconds = map(statistics.median, zip(*self._samples, strict=True))
        self.last_step = step


def _is_known(levels: dict[int, _Level]) -> bool:
    """Steps without drafts and with some were seen often enough."""
    return 0 in levels and levels[0].is_sound and any(level.is_sound for place, level in levels.items() if place)


def _size(num_sequences: int) -> int:
    return round(2 * math.log2(num_sequences))


def _interpolated(points: list[tuple[float, float]], x: float) -> float:
    """points: by rising x, the first of them (0, 1). Behind the last, the line from the second to it goes on.

    The step from no drafts to some may cost extra; so the second, but at least with half the slope from the first.
    """
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    (left, low), (last, high) = points[1], points[-1]
    slope = steepest = (high - 1) / last
    if left < last:
        slope = min(max((high - low) / (last - left), steepest / 2), steepest)
    return high + slope * (x - last)
