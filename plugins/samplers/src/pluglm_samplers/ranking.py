"""Keeps exactly the n best tokens of each row; ties rank by token id, lowest first. Knows no sampling parameter."""

from __future__ import annotations

import numpy as np
import torch

# R: rows, V: vocabulary, C: values of a row that are looked at, k: the largest of counts_R or one more, T: tied rows


SHORT = 1024  # values of a row, so many rows of which fit into a cache


def is_best_by_row(values_RV: torch.Tensor) -> bool:
    """Whether the host had better take row after row, by numpy: few rows, or long ones."""
    return values_RV.device.type == "cpu" and (values_RV.shape[0] <= 4 or values_RV.shape[1] > SHORT)


def sort_best(values_RC: torch.Tensor, count: int) -> torch.Tensor:
    """best_Rk: the `count` (1 .. C) largest values of each row, largest first, NaN before all.

    On the host numpy sorts everything, with vector instructions, in a half of the time that torch.topk takes for few.
    """
    if values_RC.device.type != "cpu":
        return torch.topk(values_RC, count, dim=-1).values
    return torch.from_numpy(np.sort(values_RC.numpy(), axis=-1)[:, : -count - 1 : -1].copy())


def keep_best(logits_RV: torch.Tensor, counts_R: torch.Tensor, best_Rk: torch.Tensor | None = None) -> torch.Tensor:
    """All but the counts_R (int64, 1 .. V) best tokens of each row go to -inf, in place.

    best_Rk: what `sort_best` gives for one more than the largest count, or for V, from who has it already.
    """
    if best_Rk is None:
        best_Rk = sort_best(logits_RV, min(int(counts_R.max()) + 1, logits_RV.shape[1]))
    if logits_RV.device.type == "cpu":
        _keep_best_on_host(logits_RV.numpy(), best_Rk.numpy(), counts_R.numpy())
        return logits_RV
    counts_R1 = counts_R.unsqueeze(1)
    last_R1 = best_Rk.gather(1, counts_R1 - 1)
    next_R1 = best_Rk.gather(1, counts_R1.clamp(max=best_Rk.shape[1] - 1))
    is_cut_R1 = (counts_R1 < logits_RV.shape[1]) & (last_R1 > -torch.inf)
    if bool(((next_R1 == last_R1) & is_cut_R1).any()):
        return _keep_first_ties(logits_RV, counts_R1, last_R1)
    return drop_below(logits_RV, last_R1)


def _keep_best_on_host(logits_RV: np.ndarray, best_Rk: np.ndarray, counts_R: np.ndarray) -> None:
    """By numpy, which takes less to call and starts no threads."""
    rows_R = np.arange(len(counts_R))
    last_R = best_Rk[rows_R, counts_R - 1]
    next_R = best_Rk[rows_R, np.minimum(counts_R, best_Rk.shape[1] - 1)]
    is_dropped_RV = logits_RV < last_R[:, None]
    if ((next_R == last_R) & (last_R > -np.inf)).any():  # logits of the value of the last one, maybe too many of them
        is_tied_RV = logits_RV == last_R[:, None]
        room_R = counts_R - (best_Rk == last_R[:, None]).argmax(-1)
        is_dropped_RV |= is_tied_RV & (is_tied_RV.cumsum(-1, dtype=np.int32) > room_R[:, None])
    np.copyto(logits_RV, np.float32(-np.inf), where=is_dropped_RV)


def drop_below(logits_RV: torch.Tensor, floor_R1: torch.Tensor) -> torch.Tensor:
    """What is less than its row's floor goes to -inf, in place; NaN stays."""
    if logits_RV.device.type != "cpu":
        return logits_RV.masked_fill_(logits_RV < floor_R1, -torch.inf)
    host_RV = logits_RV.numpy()  # numpy compares with vector instructions, torch an element at a time
    np.copyto(host_RV, np.float32(-np.inf), where=host_RV < floor_R1.numpy())
    return logits_RV


def _keep_first_ties(logits_RV: torch.Tensor, counts_R1: torch.Tensor, last_R1: torch.Tensor) -> torch.Tensor:
    """keep_best where some row has more logits of the value last_R1, its last one to stay, than there is room for."""
    above_RV = logits_RV > last_R1
    tied_RV = logits_RV == last_R1
    room_R1 = counts_R1 - above_RV.sum(-1, keepdim=True)
    tied_RV &= tied_RV.cumsum(-1) <= room_R1
    return logits_RV.masked_fill_(~(above_RV | tied_RV), -torch.inf)
