"""Rows on the host, by numpy: it has vector instructions where torch has none, takes less to call, starts no threads.

A long row is taken alone, since it fits into a core's cache, and as its live tokens when they are few. So what is made
of few live tokens never depends on how many masked ones lie between them: `fused` relies on that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm_samplers.columns import FLOAT32

# R: rows, V: vocabulary, B: rows of a block (one, if it has more than SHORT columns), C: columns of a block

SHORT = 1024  # values of a row, so many rows of which fit into a cache
_FEW = 2048  # values that numpy adds up before torch has begun; of more it takes three times as long

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]
Ids = NDArray[np.int64]


def on_host(logits_RV: torch.Tensor) -> bool:
    """Whether rows are taken by numpy; elsewhere by torch."""
    return logits_RV.device.type == "cpu"


def in_blocks(change: Callable[..., None], logits_RV: torch.Tensor, *columns_R1: NDArray[Any]) -> torch.Tensor:
    """logits_RV, changed in place by change(logits_BC, *columns_B1), which gets every row once.

    A block holds all rows if they are short; else one row, or its live tokens in the order of their ids if they are
    SHORT or fewer. Rows without a live token may come among others, and never alone.
    """
    host_RV = logits_RV.numpy()
    with np.errstate(all="ignore"):  # of rows with NaN, infinite logits or nothing alive, which stay without a token
        if host_RV.shape[1] <= SHORT:
            change(host_RV, *columns_R1)
            return logits_RV
        for row, logits_V in enumerate(host_RV):
            columns_11 = [column_R1[row : row + 1] for column_R1 in columns_R1]
            ids_C = few_live(logits_V)
            if ids_C is None:
                change(logits_V[None], *columns_11)
            elif len(ids_C):
                logits_1C = logits_V[None, ids_C]
                change(logits_1C, *columns_11)
                logits_V[ids_C] = logits_1C[0]
    return logits_RV


def few_live(logits_V: Floats, most: int = SHORT) -> Ids | None:
    """The ids of the tokens that are not masked (NaN is not), ascending; None if they are more than `most`."""
    is_live_V = logits_V != -np.inf
    return is_live_V.nonzero()[0] if np.count_nonzero(is_live_V) <= most else None


def running_sums(mass_BC: Floats) -> Wide:
    """Of each row in the order of its ids, float64; zeros between the others change no bit of what follows."""
    if mass_BC.size <= _FEW:
        return mass_BC.cumsum(-1, dtype=np.float64)
    running_BC: Wide = torch.from_numpy(mass_BC).cumsum(-1, dtype=torch.float64).numpy()
    return running_BC


def row_sums(values_BC: Wide) -> Wide:
    """sums_B1. Of a short row a running sum, which zeros between the others do not change."""
    if values_BC.shape[1] <= SHORT:
        sums_B1: Wide = values_BC.cumsum(-1)[:, -1:]
        return sums_B1
    total_B1: Wide = values_BC.sum(-1, keepdims=True)
    return total_B1


def masses(logits_BC: Floats) -> tuple[Floats, Floats, Wide]:
    """below_BC: l - max l. mass_BC: exp of it, the probabilities but for a factor. total_B1: their sum.

    The mass of the best token is 1 and that of a masked one 0. All are NaN in a row whose best logit is not finite.
    """
    below_BC = logits_BC - logits_BC.max(-1, keepdims=True)
    mass_BC = np.exp(below_BC)
    return below_BC, mass_BC, row_sums(mass_BC.astype(np.float64))


def mean_below(below_BC: Floats, mass_BC: Floats, total_B1: Wide) -> Wide:
    """mean_B1 of l - max l over the row's distribution: its entropy is ln(total) - mean."""
    finite_BC = np.maximum(below_BC, np.float32(FLOAT32.min))  # -inf times a mass of 0 would be NaN
    finite_BC *= mass_BC
    return row_sums(finite_BC.astype(np.float64)) / total_B1


def drop_where(logits_BC: Floats, is_dropped_BC: NDArray[np.bool_]) -> None:
    """To -inf, in place."""
    np.copyto(logits_BC, np.float32(-np.inf), where=is_dropped_BC)


def keep_only(logits_V: Floats, ids_n: Ids) -> None:
    """All others to -inf, in place."""
    kept_n = logits_V[ids_n]
    logits_V.fill(-np.inf)
    logits_V[ids_n] = kept_n
