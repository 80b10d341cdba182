"""Keeps exactly the n best tokens of each row; ties rank by token id, lowest first. Knows no sampling parameter."""

from __future__ import annotations

import numpy as np
import torch

# R: rows, V: vocabulary, C: values of a row that are looked at, k: the largest of counts_R or one more, T: tied rows


def is_best_by_row(values_RV: torch.Tensor) -> bool:
    """Whether the host had better take row after row, by numpy: few rows, or too long for a cache to hold many."""
    return values_RV.device.type == "cpu" and (values_RV.shape[0] <= 4 or values_RV.shape[1] > 1024)


def sort_best(values_RC: torch.Tensor, count: int) -> torch.Tensor:
    """best_Rk: the `count` (1 .. C) largest values of each row, largest first.

    On the host numpy sorts everything, with vector instructions, in a half of the time that torch.topk takes for few.
    """
    if values_RC.device.type != "cpu":
        return torch.topk(values_RC, count, dim=-1).values
    return torch.from_numpy(np.sort(values_RC.numpy(), axis=-1)[:, : -count - 1 : -1].copy())


def keep_best(logits_RV: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """All but the counts_R (int64, 1 .. V) best tokens of each row go to -inf, in place."""
    if logits_RV.device.type == "cpu":
        _keep_best_on_host(logits_RV.numpy(), counts_R.numpy())
        return logits_RV
    counts_R1, vocab_size = counts_R.unsqueeze(1), logits_RV.shape[1]
    best_Rk = sort_best(logits_RV, min(int(counts_R.max()) + 1, vocab_size))
    last_R1 = best_Rk.gather(1, counts_R1 - 1)
    next_R1 = best_Rk.gather(1, counts_R1.clamp(max=best_Rk.shape[1] - 1))
    if bool(((next_R1 == last_R1) & (counts_R1 < vocab_size) & (last_R1 > -torch.inf)).any()):
        return _keep_first_ties(logits_RV, counts_R1, last_R1)
    return drop_below(logits_RV, last_R1)


def _keep_best_on_host(logits_RV: np.ndarray, counts_R: np.ndarray) -> None:
    """keep_best by numpy, which takes less to call and starts no threads."""
    rows_R, vocab_size = np.arange(len(counts_R)), logits_RV.shape[1]
    sorted_RV = np.sort(logits_RV, axis=-1)
    last_R = sorted_RV[rows_R, vocab_size - counts_R]
    next_R = sorted_RV[rows_R, np.maximum(vocab_size - counts_R - 1, 0)]
    is_dropped_RV = logits_RV < last_R[:, None]
    tied = np.flatnonzero((next_R == last_R) & (counts_R < vocab_size) & (last_R > -np.inf))
    if len(tied):  # more logits of the value of the last one than there is room for
        logits_TV, last_T1 = logits_RV[tied], last_R[tied, None]
        is_tied_TV = logits_TV == last_T1
        room_T1 = counts_R[tied, None] - np.count_nonzero(logits_TV > last_T1, axis=-1, keepdims=True)
        is_dropped_RV[tied] |= is_tied_TV & (is_tied_TV.cumsum(-1, dtype=np.int32) > room_T1)
    np.putmask(logits_RV, is_dropped_RV, np.float32(-np.inf))


def drop_below(logits_RV: torch.Tensor, floor_R1: torch.Tensor) -> torch.Tensor:
    """What is less than its row's floor goes to -inf, in place; NaN stays."""
    if logits_RV.device.type != "cpu":
        return logits_RV.masked_fill_(logits_RV < floor_R1, -torch.inf)
    host_RV = logits_RV.numpy()  # numpy compares with vector instructions, torch an element at a time
    np.putmask(host_RV, host_RV < floor_R1.numpy(), np.float32(-np.inf))
    return logits_RV


def _keep_first_ties(logits_RV: torch.Tensor, counts_R1: torch.Tensor, last_R1: torch.Tensor) -> torch.Tensor:
    """keep_best where some row has more logits of the value last_R1, its last one to stay, than there is room for."""
    above_RV = logits_RV > last_R1
    tied_RV = logits_RV == last_R1
    room_R1 = counts_R1 - above_RV.sum(-1, keepdim=True)
    tied_RV &= tied_RV.cumsum(-1) <= room_R1
    return logits_RV.masked_fill_(~(above_RV | tied_RV), -torch.inf)
