"""The shortest prefix of an order of a long row that has a given mass, without sorting the row."""

from __future__ import annotations

import numpy as np

from pluglm_samplers.blocks import Floats, drop_where

# V: vocabulary, n: tokens among which the prefix ends

_FINENESS, _NUM_BINS = 64, 4096  # bins a unit of rank, and of all that is told apart
_LEAST = np.finfo(np.float64).tiny  # of a mass: a token comes with it
_SLACK = 1e-9  # far more than the order of a sum of V float64 can change


def keep_mass_prefix(logits_V: Floats, rank_V: Floats, mass_V: Floats, wanted: float) -> int:
    """All but the prefix go to -inf, in place; how many tokens stay, at least one.

    rank_V: not negative, the lowest first, ties by id. Ranks are put into bins, and only those tokens are sorted in
    whose bins the mass is reached: what comes before is added up as it lies.
    """
    wanted = max(wanted, _LEAST)
    bins_V = np.minimum(rank_V * np.float32(_FINENESS), np.float32(_NUM_BINS - 1)).astype(np.int64)
    running = np.bincount(bins_V, weights=mass_V, minlength=_NUM_BINS).cumsum()
    first = min(int(running.searchsorted(wanted * (1 - _SLACK))), _NUM_BINS - 1)
    last = min(int(running.searchsorted(wanted * (1 + _SLACK))), _NUM_BINS - 1)
    ids_n = ((bins_V >= first) & (bins_V <= last)).nonzero()[0]
    before = float(running[first - 1]) if first else 0.0
    # (rank, id) as one integer, which vector instructions sort: floats that are not negative order as their bits.
    keys_n = rank_V[ids_n].view(np.int32).astype(np.int64) << 32 | np.arange(len(ids_n))
    keys_n.sort()
    ids_n = ids_n[keys_n & 0xFFFFFFFF]
    reached = before + mass_V[ids_n].cumsum(dtype=np.float64) >= wanted
    count = int(reached.argmax()) + 1 if reached.any() else len(ids_n)
    is_dropped_V = bins_V >= first
    is_dropped_V[ids_n[:count]] = False
    drop_where(logits_V, is_dropped_V)
    return len(logits_V) - int(np.count_nonzero(is_dropped_V))
