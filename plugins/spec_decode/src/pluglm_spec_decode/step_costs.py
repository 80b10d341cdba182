"""What a step takes by the drafts in it: measured on a clock, or a fixed share for each draft."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise
from typing import Protocol

SAMPLES = 15  # medians are of the latest so many
RECENT = 5  # steps that say how slow the machine is just now
MIN_SAMPLES = 3  # a single step may have computed a long prompt as well
FRESH_STEPS = 512  # what was not seen for so many steps of a size is forgotten, and so tried again
PLAIN_EVERY = 64  # steps at most between two measurements without drafts
KEPT_STEPS = 8  # for so many steps what was measured before is good enough
ASSUMED_COST = 0.1  # of a draft of every sequence, until something is measured


class StepCosts(Protocol):
    """Times of steps, in a unit of its own."""

    def times(self, num_sequences: int, most: int) -> list[float]:
        """Of a step of so many sequences with 0, 1, ... most drafts in all."""
        ...


class FixedCosts:
    """Every draft of a sequence adds the same share of a plain step, whose time is 1."""

    def __init__(self, draft_cost: float) -> None:
        self._draft_cost = draft_cost

    def times(self, num_sequences: int, most: int) -> list[float]:
        return [1 + self._draft_cost * drafts / num_sequences for drafts in range(most + 1)]


class MeasuredCosts:
    """Medians of step times by the size of the batch and the drafts in it, and straight lines between them.

    Batches whose sizes are within about a quarter of each other share what was measured. A machine that others use is
    slower at one time than at another, for many steps in a row; so times are multiples of what steps took just then,
    and those of different moments can be compared. `pace` is that unit, in seconds.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Curve] = {}
        self._latest: deque[float] = deque(maxlen=RECENT)  # seconds a unit of the curves, of the latest steps
        self.pace = 1.0  # their median: what a unit takes now
        self._tables: dict[int, list[float]] = {}  # answers of `times`, good for some steps: they take a while to make
        self._num_noted = 0

    @property
    def has_pace(self) -> bool:
        """Some step was noted, so that `pace` says something."""
        return bool(self._latest)

    def times(self, num_sequences: int, most: int) -> list[float]:
        """Or more of them, never falling. A size without measurements takes those of the nearest.

        Without any, a draft of every sequence costs ASSUMED_COST of a plain step.
        """
        table = self._tables.get(num_sequences)
        if table is None or len(table) <= most:
            table = self._tables[num_sequences] = _interpolated(self._points(num_sequences), most, num_sequences)
        return table

    def wants_plain(self, num_sequences: int) -> bool:
        """Whether the next step of so many should have no drafts: only then is it known what those cost."""
        curve = self._sizes.get(_size(num_sequences))
        return curve is not None and curve.wants_plain()

    def note(self, num_sequences: int, num_drafts: int, seconds: float, num_steps: int = 1) -> None:
        """A step of so many sequences, with num_drafts in all, took so long; the first of num_steps like it."""
        unit_s = seconds / self.times(num_sequences, num_drafts)[num_drafts]
        curve = self._sizes.setdefault(_size(num_sequences), _Curve(num_sequences))
        if not self._latest or curve.knows(num_drafts):  # of what is not known yet it does not say how slow it is now
            self._latest.append(unit_s)
            self.pace = statistics.median(self._latest)
        self._num_noted += 1
        is_settled = curve.note(num_drafts, seconds / self.pace, num_steps)
        if not is_settled or self._num_noted % KEPT_STEPS == 0:
            self._tables.clear()

    def _points(self, num_sequences: int) -> list[tuple[float, float]]:
        """(drafts in all, units) by rising drafts, from 0 on and two at least."""
        size = _size(num_sequences)
        own = self._sizes.get(size)
        if own is not None and own.is_known:
            return own.points()
        if known := [one for one, curve in self._sizes.items() if curve.is_known]:
            nearest = self._sizes[min(known, key=lambda one: (abs(one - size), one))]
            share = num_sequences / nearest.num_sequences
            return [(drafts * share, units) for drafts, units in nearest.points()]
        plain = own.plain if own is not None and own.plain else 1.0
        return [(0.0, plain), (float(num_sequences), plain * (1 + ASSUMED_COST))]


class _Curve:
    """Times of steps of one size, by levels of about the same number of drafts."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self._levels: dict[int, _Level] = {}
        self._step = 0

    @property
    def plain(self) -> float | None:
        return self._levels[0].medians[1] if self.knows(0) else None

    @property
    def is_known(self) -> bool:
        """Steps without drafts and with some were seen often enough."""
        return self.knows(0) and self._has_drafts

    @property
    def _has_drafts(self) -> bool:
        return any(level.is_sound for place, level in self._levels.items() if place)

    def knows(self, num_drafts: int) -> bool:
        level = self._levels.get(num_drafts.bit_length())
        return level is not None and level.is_sound

    def wants_plain(self) -> bool:
        if not self._has_drafts:
            return False
        return not self.knows(0) or self._step - self._levels[0].last_step >= PLAIN_EVERY

    def note(self, num_drafts: int, units: float, num_steps: int) -> bool:
        """Whether there were enough samples like this before, so that one more says little."""
        self._step += num_steps
        level = self._levels.setdefault(num_drafts.bit_length(), _Level())
        is_settled = len(level.samples) == SAMPLES
        level.samples.append((num_drafts, units))
        level.last_step = self._step
        for place, one in list(self._levels.items()):
            if self._step - one.last_step > FRESH_STEPS:
                del self._levels[place]
        return is_settled

    def points(self) -> list[tuple[float, float]]:
        sound = [(*level.medians, len(level.samples)) for level in self._levels.values() if level.is_sound]
        return _never_falling(sorted(sound))


class _Level:
    """Steps with about the same number of drafts: of each the drafts, and units of time."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self.last_step = 0

    @property
    def is_sound(self) -> bool:
        return len(self.samples) >= MIN_SAMPLES

    @property
    def medians(self) -> tuple[float, float]:
        drafts, units = map(statistics.median, zip(*self.samples, strict=True))
        return drafts, units


def _size(num_sequences: int) -> int:
    return round(2 * math.log2(num_sequences))


def _never_falling(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """(x, y) of points (x, y, weight): where y falls, those that do share their mean (pool adjacent violators)."""
    pools: list[tuple[float, int, list[float]]] = []
    for x, y, weight in points:
        pool = (y, weight, [x])
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return [(x, y) for y, _, some in pools for x in some]


def _interpolated(points: list[tuple[float, float]], most: int, num_sequences: int) -> list[float]:
    """At 0, 1, ... most. points: by rising x, from 0 on, two at least. Behind the last the line before it goes on.

    The first draft may cost extra, so that is the line from the second point; but at least half as steep as from 0, and
    no steeper than that a draft takes what a sequence of a plain step does, since it is a row like that.
    """
    lines = [(*left, (right[1] - left[1]) / (right[0] - left[0])) for left, right in pairwise(points)]
    (start, plain), last = points[0], points[-1]
    overall = (last[1] - plain) / (last[0] - start)
    onward = min(max(lines[-1][2], overall / 2), overall, plain / num_sequences)
    lines.append((*last, onward))
    values, place = [], 0
    for x in range(most + 1):
        while place + 1 < len(lines) and x > lines[place + 1][0]:
            place += 1
        start, value, slope = lines[place]
        values.append(value + slope * (x - start))
    return values
