"""Counter-based uniforms: a coin is a pure function of (seed, lane, position, purpose, index). No stream is shared.

Generator: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as numpy ships it.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from functools import lru_cache

import numpy as np

_COUNTERS = 2**256
_RUN = 64  # positions, a power of two: making a generator takes as long as a hundred blocks of it


class Purpose(IntEnum):
    """Separate domains of coins: one position may need several, and none may serve twice."""

    DRAW = 0
    ACCEPT = 1
    RECOVER = 2
    PROPOSE = 3
    STEP = 4


def philox_block(key: tuple[int, int], counter: int) -> tuple[int, int, int, int]:
    """The four 64-bit words of Philox4x64-10 for two key words and a 256-bit counter (word 0 is the lowest)."""
    # numpy advances the counter before it makes a block, so it is handed the one before.
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=(counter - 1) % _COUNTERS)
    words = generator.random_raw(4)
    return int(words[0]), int(words[1]), int(words[2]), int(words[3])


def uniform(seed: int, lane: int, position: int, purpose: Purpose = Purpose.DRAW, index: int = 0) -> float:
    """u in the open interval (0, 1). seed, lane, position, index: 0 .. 2**64 - 1.

    Key words (seed, lane), counter words (position, purpose, index, 0). The top 52 bits of word 0 choose the midpoint
    (k + 1/2) / 2**52: with 53 bits the largest midpoint would round to 1.0 in float64.
    """
    word = philox_block((seed, lane), (index << 128) | (int(purpose) << 64) | position)[0]
    return ((word >> 12) + 0.5) * 2.0**-52


def window_uniforms(seed: int, lane: int, start: int, count: int, purpose: Purpose) -> array[float]:
    """`uniform` at positions start .. start + count - 1, with the window's start as their index.

    What a window looks at behind the end of its run, the next window must not see again (see docs/speculation.md), so
    its coins belong to the window and not to their positions alone.
    """
    return _uniforms(seed, lane, start, count, purpose, start)


class Coins:
    """`uniform` for the positions of many outputs, one after another. Thread-safe: it remembers, and has no state.

    num_runs: how many runs of 64 positions, half a kilobyte each, are remembered; the one used longest ago goes first.
    """

    def __init__(self, num_runs: int = 4096) -> None:
        self._run = lru_cache(num_runs)(_uniforms)

    def uniform(self, seed: int, lane: int, position: int, purpose: Purpose = Purpose.DRAW) -> float:
        place = position % _RUN
        return self._run(seed, lane, position - place, _RUN, purpose)[place]


def _uniforms(seed: int, lane: int, first: int, count: int, purpose: Purpose, index: int = 0) -> array[float]:
    """`uniform` at count positions from `first` on: their counters follow each other."""
    counter = ((index << 128) | (int(purpose) << 64) | first) - 1
    generator = np.random.Philox(key=np.array((seed, lane), dtype=np.uint64), counter=counter % _COUNTERS)
    words = generator.random_raw(4 * count)[::4]
    return array("d", ((words >> np.uint64(12)) + 0.5) * 2.0**-52)
