"""The fast path of a chain on the host: from the first step on that keeps few tokens, steps get those alone.

A row of 50,000 logits becomes a short one of its best tokens, and the steps behind run on a batch of short rows. They
are the same steps, and what they make of few live tokens does not depend on masked ones (see `blocks`), so the token
that is drawn is that of the whole rows, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import SHORT
from pluglm_samplers.ranking import find_best

# R: rows, V: vocabulary, C: candidates of a row, n: candidates of all rows

MOST_KEPT = SHORT // 2  # a step that keeps more does not make rows short: ties and their like come on top


@runtime_checkable
class OrderStep(Protocol):
    """Optional ability of a logits step: it looks at the live logits and the order of their ids, never at the ids.

    So it makes of the live tokens of a row, side by side, what it makes of the row; bit for bit, up to SHORT of them.
    """

    def most_kept(self, params: SamplingParams) -> int | None:
        """How many tokens it keeps at most, if these are the best of a row and no other logit matters; None if not."""
        ...


class Candidates(NamedTuple):
    """The tokens that may be kept, in the order of their ids. logits_RC is padded with -inf, a row's ids with 0."""

    logits_RC: torch.Tensor
    ids: list[list[int]]


def find_candidates(logits_RV: torch.Tensor, count: int) -> Candidates | None:
    """Of each row the `count` best tokens, those that tie with them, and some more.

    None if rows are short already, if that is more than SHORT of any row (too many ties), or if a row's best logit is
    not finite: then all of them have to be taken as they are.
    """
    host_RV = logits_RV.numpy()
    if host_RV.shape[1] <= SHORT or not np.isfinite(host_RV.max(-1)).all():
        return None
    rows_n, ids_n = find_best(host_RV, count)
    lengths_R = np.bincount(rows_n, minlength=len(host_RV))
    width = int(lengths_R.max())
    if width > SHORT:
        return None
    columns_n = np.arange(len(rows_n)) - (lengths_R.cumsum() - lengths_R)[rows_n]
    shape = (len(host_RV), width)
    found_RC, ids_RC = np.full(shape, -np.inf, dtype=np.float32), np.zeros(shape, dtype=np.int64)
    found_RC[rows_n, columns_n] = host_RV[rows_n, ids_n]
    ids_RC[rows_n, columns_n] = ids_n
    return Candidates(torch.from_numpy(found_RC), ids_RC.tolist())
