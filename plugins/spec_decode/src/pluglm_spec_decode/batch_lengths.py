"""Which drafts of a batch are worth their time. Pure functions of chances and times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Lengths(NamedTuple):
    """drafts: of each sequence. speedup: tokens by time of the whole step, over those without drafts; 1 or more."""

    drafts: list[int]
    speedup: float


def best_lengths(
    worth: Sequence[Sequence[float]], times: Sequence[float], round_time: float = 0.0, any_time: float = 0.0
) -> Lengths:
    """The drafts that give the most tokens by time: the goodput of a step (Liu et al., 2024, arXiv 2406.14066).

    worth: of each sequence, by place, how many tokens one draft more is expected to add; never rising. times: of a step
    with 0, 1, 2 ... drafts in all, for every draft in worth. round_time: of a round of drafting, which makes one draft
    more for all that want it. any_time: what it takes to draft at all. All times are in one unit. Drafts are taken in
    order of worth, over all sequences; the fewest of equals.
    """
    ordered = sorted((-value, depth, place) for place, some in enumerate(worth) for depth, value in enumerate(some, 1))
    plain = speed = len(worth) / times[0]
    tokens, deepest, best = float(len(worth)), 0, 0
    for count, (value, depth, _) in enumerate(ordered, 1):
        tokens -= value
        deepest = max(deepest, depth)
        if (found := tokens / (times[count] + round_time * deepest + any_time)) > speed:
            best, speed = count, found
    drafts = [0] * len(worth)
    for _, _, place in ordered[:best]:
        drafts[place] += 1
    return Lengths(drafts, speed / plain)


def least_worth(num_sequences: int, times: Sequence[float]) -> float:
    """No best lengths have a draft that is worth less: without it the step would be shorter by more than that."""
    slope = min((after - before for before, after in pairwise(times)), default=0.0)
    return num_sequences / times[0] * slope
