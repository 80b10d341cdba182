"""Small helpers of the logits steps: one value per row, token ids per row, and arithmetic that stays finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm.kernel.sampling_params import SamplingParams

# R: rows, V: vocabulary, n: tokens of all rows, one row after another

FLOAT32 = torch.finfo(torch.float32)
_MAX_KNOWN = 4096  # params that something is remembered for

T = TypeVar("T")


class PerParams(Generic[T]):
    """What a step makes of a request's params, made once: it is asked for with every token of the request."""

    def __init__(self, make: Callable[[SamplingParams], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[SamplingParams, T]] = {}  # by id, of objects that are kept alive here

    def __call__(self, params: SamplingParams) -> T:
        known = self._known.get(id(params))
        if known is None or known[0] is not params:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[id(params)] = params, self._make(params)
        return known[1]


def column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    """values_R1 float32, clamped to what float32 holds: 1e300 must become the largest number, not infinity."""
    clamped = [min(max(value, FLOAT32.min), FLOAT32.max) for value in values]
    return torch.tensor(clamped, dtype=torch.float32, device=device).unsqueeze(1)


def wide_column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    """values_R1 float64."""
    return torch.tensor(list(values), dtype=torch.float64, device=device).unsqueeze(1)


def id_tensor(ids: Iterable[int]) -> torch.Tensor:
    """ids_n int64, distinct and ascending, on the host."""
    return torch.tensor(sorted(set(ids)), dtype=torch.int64)


def places(ids: Sequence[torch.Tensor], logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows_n, ids_n) int64 of the tokens that ids, one tensor a row, name; they index logits_RV and live beside it.

    ValueError for an id outside the vocabulary, -1 included: torch would take it for the last token.
    """
    num_rows, vocab_size = logits_RV.shape
    lengths_R = torch.tensor([len(one) for one in ids])
    ids_n = torch.cat(list(ids))
    require_ids(ids_n, vocab_size)
    rows_n = torch.arange(num_rows).repeat_interleave(lengths_R)
    return rows_n.to(logits_RV.device), ids_n.to(logits_RV.device)


def require_ids(ids_n: torch.Tensor | NDArray[np.int64], vocab_size: int) -> None:
    """ValueError unless all of them are in the vocabulary."""
    if len(ids_n) and (int(ids_n.min()) < 0 or int(ids_n.max()) >= vocab_size):
        raise ValueError(f"token ids {int(ids_n.min())}..{int(ids_n.max())} leave the vocabulary of {vocab_size}")


def row_sum(values_RV: torch.Tensor) -> torch.Tensor:
    """sums_R1 float64. A running sum, never `sum`: torch splits the sum of a single row among threads, so its bits
    would depend on R."""
    return values_RV.cumsum(-1, dtype=torch.float64)[:, -1:]


def entropy(logits_RV: torch.Tensor) -> torch.Tensor:
    """H_R1 float64 in nats of the rows' softmax (float32); NaN for a row that has none."""
    return row_sum(torch.special.entr(logits_RV.softmax(-1)))


def keep_finite(changed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """changed with overflow clamped to the largest float32; what was -inf, +inf or NaN before stays it."""
    return changed.clamp_(FLOAT32.min, FLOAT32.max).where(before.isfinite(), before)
