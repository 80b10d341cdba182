"""The chains of the kit of verification: filtered ones, those of the sweep, and one on which wrong rules show."""

from __future__ import annotations

import numpy as np

from pluglm.testing.lossless_chains import Chain, random_chain
from pluglm.testing.lossless_filters import FILTERS, plain

# V = 3, k = 2, in twentieths: the target's 13 rows by context (none, 0, 1, 2, 00, 01, ... 22), then the drafter's 4.
# Found by a random search and hill climbing, which maximised the smallest power of the cell test over wrong rules
# (recovery from p, acceptance with p, a one-hot residual, a token-wise residual behind block acceptance, typical
# acceptance, a coin used twice, an argmax draft scored softly, unlikely drafts dropped).
_SEARCHED = (
    (4, 12, 4), (1, 15, 4), (10, 2, 8), (1, 13, 6), (12, 3, 5), (16, 3, 1), (2, 17, 1), (9, 5, 6), (14, 3, 3),
    (18, 1, 1), (15, 3, 2), (12, 1, 7), (8, 2, 10),
    (2, 17, 1), (16, 3, 1), (7, 12, 1), (14, 1, 5),
)  # fmt: skip


def searched_chain() -> Chain:
    """The chain on which every wrong rule is caught within 8,000 windows, but for one run in a million."""
    rows = np.array(_SEARCHED) / 20
    return Chain((rows[:1], rows[1:4], rows[4:13]), (rows[13:14], rows[14:17]))


def filtered_chains(num_tokens: int, num_drafts: int) -> dict[str, Chain]:
    """One chain for each filter on the target's rows, with it on the drafter's rows as well and without.

    Where there are more than fifty proposals, two: without filters, and with all of them on both.
    """
    found, is_large = dict[str, Chain](), num_tokens**num_drafts > 50
    for name, on_target in FILTERS.items():
        if is_large and name not in ("plain", "everything"):
            continue
        for what, on_draft in {"": on_target, " on the target only": plain}.items():
            if what and (on_draft is on_target or is_large):
                continue
            found[name + what] = random_chain(num_tokens, num_drafts, 31, on_target, on_draft)
    return found


def sweep_chains(count: int) -> list[Chain]:
    """V = 5, k = 1; entries of 0.02 or more, and sum min(p, q) at most 0.7, so that refusals are common."""
    random, found = np.random.default_rng(5), list[Chain]()
    while len(found) < count:
        p, q, bonus = (0.02 + 0.9 * random.dirichlet(np.ones(5), size) for size in (1, 1, 5))
        if np.minimum(p, q).sum() <= 0.7:
            found.append(Chain((p, bonus), (q,)))
    return found
