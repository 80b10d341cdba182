"""The shortest prefix of an order of a long row that has a given mass, without sorting the row.

Two sums of the same masses may differ in their last bits. So the prefix is told only where that does not matter;
elsewhere whoever asked has to sort, and always gets what sorting gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from pluglm_samplers.blocks import SHORT, Floats, Ids, Wide, running_sums

# V: vocabulary, n: tokens that may be in the prefix, e: those of them among which it ends, S: tokens of a sample

_SAMPLE = 1024  # tokens by which the mass of unlikely ones is guessed
_SHARE = 0.7  # of the mass that may be dropped, how much a guess drops: it is seldom that far off
_NUM_BINS = 512
_LEAST = np.finfo(np.float64).tiny  # of a mass: a token comes with it


def floors(below_V: Floats, spare: float) -> Iterator[float]:
    """Numbers that the tokens with a smaller l - max l have at most `spare` mass below: a guess, then a sure one.

    The guess counts each token of a sample for many. That is no bad one, since tokens so far below are light. The sure
    one: V tokens of spare / V have that mass, less than a thousandth of it to spare for rounding.
    """
    step = max(1, len(below_V) // _SAMPLE)
    sample_S = np.sort(below_V[::step])
    running_S = np.exp(sample_S).astype(np.float64).cumsum()
    place = int(running_S.searchsorted(_SHARE * spare / step))
    yield float(sample_S[min(place, len(sample_S) - 1)])
    yield math.log(max(spare, _LEAST) / len(below_V)) - 1e-3


def mass_prefix(rank_V: Floats, mass_V: Floats, wanted: float, ceilings: Iterable[float]) -> Ids | None:
    """Ids of the prefix, ascending, at least one. None where the order of sums may decide where it ends.

    rank_V: the lowest first, ties by id; no NaN. mass_V: at most 1 each. ceilings: of ranks, of which the first is
    taken up to which there is mass enough; None if there is not with any.
    """
    wanted = max(wanted, _LEAST)
    slack = len(rank_V) * 2.0**-51  # of V float64, more than sums in two orders can differ
    for ceiling in ceilings:
        ids_n = (rank_V <= ceiling).nonzero()[0]
        rank_n, mass_n = rank_V.take(ids_n), mass_V.take(ids_n)
        bins_n = _bins(rank_n)
        running = _masses_of(bins_n, mass_n).cumsum()
        if len(ids_n) and running[-1] >= wanted * (1 + slack):
            break
    else:
        return None
    first = int(running.searchsorted(wanted * (1 - slack)))
    last = int(running.searchsorted(wanted * (1 + slack)))
    before = float(running[first - 1]) if first else 0.0
    if bins_n is None:
        is_kept_n, ends_e = np.zeros(len(ids_n), dtype=np.bool_), np.arange(len(ids_n))
    else:
        is_kept_n, ends_e = bins_n < first, ((bins_n >= first) & (bins_n <= last)).nonzero()[0]
    ends_e = _ordered(ends_e, rank_n)
    sums_e = running_sums(mass_n[None, ends_e])[0] + before
    count = _count(sums_e, wanted, slack, mass_V)
    if count is None:
        return None
    is_kept_n[ends_e[:count]] = True
    return ids_n[is_kept_n]


def _bins(rank_n: Floats) -> Ids | None:
    """Of each token the bin of its rank, the lowest ranks in the first; None where all are as soon sorted."""
    if len(rank_n) <= SHORT:
        return None
    low = float(rank_n.min())
    span = float(rank_n.max()) - low
    if not 1e-30 < span < 1e30:
        return None
    return ((rank_n - np.float32(low)) * np.float32((_NUM_BINS - 1) / span)).astype(np.int64)


def _masses_of(bins_n: Ids | None, mass_n: Floats) -> Wide:
    """Of each bin, float64."""
    if bins_n is None:
        return np.array([mass_n.sum(dtype=np.float64)])
    return np.bincount(bins_n, weights=mass_n).astype(np.float64, copy=False)


def _ordered(places_e: Ids, rank_n: Floats) -> Ids:
    """Places, by rank and then as they come."""
    rank_e = rank_n[places_e]
    if rank_e.min() == rank_e.max():
        return places_e
    # (rank, place) as one integer, which vector instructions sort: floats order as their bits, negative ones turned
    bits_e = rank_e.view(np.int32)
    keys_e = (bits_e ^ ((bits_e >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32 | np.arange(len(places_e))
    keys_e.sort()
    ordered_e: Ids = places_e[keys_e & 0xFFFFFFFF]
    return ordered_e


def _count(sums_e: Wide, wanted: float, slack: float, mass_V: Floats) -> int | None:
    """How many tokens reach what is wanted; None where that is too close to tell, unless sums are exact."""
    least, most = (int(sums_e.searchsorted(wanted * one)) for one in (1 - slack, 1 + slack))
    if least != most:
        if not _is_exact(mass_V):
            return None
        least = int(sums_e.searchsorted(wanted))
    return least + 1


def _is_exact(mass_V: Floats) -> bool:
    """Whether float64 holds every sum of some of them: 24 bits of the smallest, and the sum of all at most V."""
    return float(mass_V[mass_V > 0].min()) * 2.0**29 >= len(mass_V)
