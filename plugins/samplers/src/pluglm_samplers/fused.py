"""The fast path of a chain on the host: the first step that keeps few tokens, and those behind it, get these alone.

A row of 50,000 logits becomes a short one of its best tokens, and the steps behind run on a batch of short rows. They
are the same steps, and what they make of few live tokens does not depend on masked ones (see `blocks`), so the token
that is drawn is that of the whole rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import SHORT
from pluglm_samplers.ranking import Best, find_best

# R: rows, V: vocabulary, C: candidates of a row, n: candidates of all rows, 3: the best logit of a row, the least that
# is sure to be among the best, and one that is not among them

MOST_KEPT = SHORT // 2  # a step that keeps more does not make rows short: ties and their like come on top


@runtime_checkable
class OrderStep(Protocol):
    """Optional ability of a logits step: it looks at the live logits and the order of their ids, never at the ids.

    So it makes of the live tokens of a row, side by side, what it makes of the row; bit for bit, up to SHORT of them.
    """

    def most_kept(self, params: SamplingParams) -> int | None:
        """How many tokens it keeps at most, if these are the best of a row and no other logit matters; None if not."""
        ...


@runtime_checkable
class MonotonicStep(OrderStep, Protocol):
    """Optional ability of an OrderStep: what it makes of a live logit follows from that logit and the row's best one.

    A higher one stays the higher one, or becomes equal; a masked one stays masked. So the best tokens may be looked for
    before it. It is called on some of a row's logits too, more than once a draw, and must keep nothing of it.
    """

    def keeps_order(self, params: SamplingParams) -> bool:
        """Whether it is like that for a request."""
        ...


class Candidates(NamedTuple):
    """The tokens that may be kept, in the order of their ids. logits_RC is padded with -inf, a row's ids with 0."""

    logits_RC: torch.Tensor
    ids: list[list[int]]


def find_candidates(
    logits_RV: torch.Tensor, count: int, leading: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Candidates | None:
    """Of each row the `count` best tokens, those that tie with them, and some more.

    leading: the monotonic steps behind which they are to be the best ones; it gets one short row for each.

    None if rows are short already, if that is more than SHORT of any row (too many ties), if `leading` makes others
    equal to them, or if a row's best logit is not finite: then all of them have to be taken as they are.
    """
    host_RV = logits_RV.numpy()
    if host_RV.shape[1] <= SHORT:
        return None
    best = find_best(host_RV, count, slack=leading is not None)
    if not np.isfinite(best.highest_R).all() or not (leading is None or _stay_best(best, leading)):
        return None
    lengths_R = np.bincount(best.rows_n, minlength=len(host_RV))
    width = int(lengths_R.max())
    if width > SHORT:
        return None
    columns_n = np.arange(len(best.rows_n)) - (lengths_R.cumsum() - lengths_R)[best.rows_n]
    shape = (len(host_RV), width)
    found_RC, ids_RC = np.full(shape, -np.inf, dtype=np.float32), np.zeros(shape, dtype=np.int64)
    found_RC[best.rows_n, columns_n] = host_RV[best.rows_n, best.ids_n]
    ids_RC[best.rows_n, columns_n] = best.ids_n
    return Candidates(torch.from_numpy(found_RC), ids_RC.tolist())


def _stay_best(best: Best, leading: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether behind these steps, too, no token that was not found comes up to the best ones, or lives."""
    probe_R3 = np.stack((best.highest_R, best.floor_R, best.below_R), -1)
    _, floor_R, below_R = leading(torch.from_numpy(probe_R3)).unbind(-1)
    return bool(((below_R < floor_R) | (below_R == -torch.inf)).all())
