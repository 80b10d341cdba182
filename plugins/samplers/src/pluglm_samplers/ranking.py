"""Keeps exactly the n best tokens of each row; ties rank by token id, lowest first. Knows no sampling parameter."""

from __future__ import annotations

import math

import numpy as np
import torch

from pluglm_samplers.blocks import SHORT, Floats, Ids, drop_where, on_host

# R: rows, V: vocabulary, C: values of a row that are looked at, k: the largest of counts_R or one more, G: groups,
# D: tokens of a group, m: groups of all rows with a candidate, n: candidates of all rows

# Groups come in multiples of the first number, and as many for each token that is kept as the second says; where a
# group would have fewer tokens than the third, a row is sorted.
_GROUPS, _GROUPS_EACH, _MIN_DEPTH = 512, 16, 2
_MANY_GROUPS = 4  # as many for each token that is kept, and too many tie with the last one
_LOWEST = np.finfo(np.float32).min  # no masked token reaches it


def sort_best(values_RC: torch.Tensor, count: int) -> torch.Tensor:
    """best_Rk: the `count` (1 .. C) largest values of each row, largest first, NaN before all.

    On the host numpy sorts everything, with vector instructions, in a half of the time that torch.topk takes for few.
    """
    if not on_host(values_RC):
        return torch.topk(values_RC, count, dim=-1).values
    return torch.from_numpy(descending(values_RC.numpy())[:, :count].copy())


def descending(values_RC: Floats) -> Floats:
    """Each row sorted, largest first, NaN before all."""
    return np.ascontiguousarray(np.sort(values_RC, axis=-1)[:, ::-1])  # a reversed view is slow to compute with


def keep_best(logits_RV: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """All but the counts_R (int64, 1 .. V) best tokens of each row go to -inf, in place. A row with NaN may stay."""
    if on_host(logits_RV):
        _keep_best_on_host(logits_RV.numpy(), counts_R.numpy())
        return logits_RV
    best_Rk = sort_best(logits_RV, min(int(counts_R.max()) + 1, logits_RV.shape[1]))
    counts_R1 = counts_R.unsqueeze(1)
    last_R1 = best_Rk.gather(1, counts_R1 - 1)
    next_R1 = best_Rk.gather(1, counts_R1.clamp(max=best_Rk.shape[1] - 1))
    is_cut_R1 = (counts_R1 < logits_RV.shape[1]) & (last_R1 > -torch.inf)
    if bool(((next_R1 == last_R1) & is_cut_R1).any()):
        return _keep_first_ties(logits_RV, counts_R1, last_R1)
    return drop_below(logits_RV, last_R1)


def _keep_best_on_host(logits_RV: Floats, counts_R: Ids) -> None:
    """Long rows one by one, by their candidates."""
    if logits_RV.shape[1] <= SHORT:
        keep_prefix(logits_RV, descending(logits_RV), np.minimum(counts_R, logits_RV.shape[1]))
        return
    for logits_V, count in zip(logits_RV, counts_R.tolist(), strict=True):
        if not math.isfinite(logits_V.max()):
            continue
        ids_n = find_best(logits_V[None], count)[1]
        logits_1n = logits_V[None, ids_n]
        keep_prefix(logits_1n, descending(logits_1n), np.array([min(count, len(ids_n))]))
        logits_V.fill(-np.inf)
        logits_V[ids_n] = logits_1n[0]


def keep_prefix(logits_BC: Floats, best_Bk: Floats, counts_B: Ids) -> None:
    """All but the counts_B best of each row go to -inf, in place; best_Bk is what `descending` gives, or its start."""
    if len(counts_B) == 1:
        _keep_prefix_of_row(logits_BC[0], best_Bk[0], int(counts_B[0]))
        return
    rows_B1, counts_B1 = np.arange(len(counts_B))[:, None], counts_B[:, None]
    last_B1 = best_Bk[rows_B1, counts_B1 - 1]
    next_B1 = best_Bk[rows_B1, np.minimum(counts_B1, best_Bk.shape[1] - 1)]
    is_dropped_BC = logits_BC < last_B1
    if ((next_B1 == last_B1) & (last_B1 > -np.inf)).any():  # others have the value of the last one, maybe too many
        is_tied_BC = logits_BC == last_B1
        room_B1 = counts_B1 - (best_Bk == last_B1).argmax(-1, keepdims=True)
        is_dropped_BC |= is_tied_BC & (is_tied_BC.cumsum(-1, dtype=np.int32) > room_B1)
    drop_where(logits_BC, is_dropped_BC)


def _keep_prefix_of_row(logits_C: Floats, best_k: Floats, count: int) -> None:
    """The same in half the calls: what a step of one sequence costs is calls alone."""
    last = best_k[count - 1]
    is_dropped_C = logits_C < last
    if count < len(best_k) and best_k[count] == last > -np.inf:
        tied = (logits_C == last).nonzero()[0]
        is_dropped_C[tied[count - int((best_k == last).argmax()) :]] = True
    drop_where(logits_C, is_dropped_C)


def find_best(logits_RV: Floats, count: int) -> tuple[Ids, Ids]:
    """(rows_n, ids_n), ascending: of every row the `count` (1 .. V) best live tokens, and some more.

    No row is sorted where `count` is a small part of V: it is split into groups, and the count-th largest of their
    best logits is a floor that `count` tokens reach, so whatever is below it is not among the best. A group is every
    G-th token, so that large logits side by side do not fall into one. A row with many ties gives `count` tokens.
    """
    num_rows, size = logits_RV.shape
    num_groups = _GROUPS * -(-_GROUPS_EACH * count // _GROUPS)
    depth = size // num_groups
    if depth < _MIN_DEPTH:
        floors = np.sort(logits_RV, axis=-1)[:, size - count].tolist()
        places_n = np.concatenate(
            [row * size + _best_above(logits_RV[row], one, count) for row, one in enumerate(floors)]
        )
        return places_n // size, places_n % size
    grouped = depth * num_groups
    values_RDG = logits_RV[:, :grouped].reshape(num_rows, depth, num_groups)
    best_RG = values_RDG.max(1)
    floor_R1 = np.sort(best_RG, axis=-1)[:, num_groups - count, None]  # np.partition takes forever over many ties
    floor_R1 = np.maximum(floor_R1, _LOWEST)
    is_found_RG = best_RG >= floor_R1
    tied_R = (is_found_RG.sum(-1) > _MANY_GROUPS * count).nonzero()[0]
    of_tied = [row * size + _best_above(logits_RV[row], float(floor_R1[row, 0]), count) for row in tied_R.tolist()]
    is_found_RG[tied_R], floor_R1[tied_R] = False, np.inf
    rows_m, groups_m = is_found_RG.nonzero()
    found_n, depths_n = (values_RDG[rows_m, :, groups_m] >= floor_R1[rows_m]).nonzero()
    rest_rows_n, rest_ids_n = (logits_RV[:, grouped:] >= floor_R1).nonzero()
    places_n = rows_m[found_n] * size + depths_n * num_groups + groups_m[found_n]
    places_n = np.concatenate((places_n, rest_rows_n * size + grouped + rest_ids_n, *of_tied))
    places_n.sort()
    return places_n // size, places_n % size


def _best_above(logits_V: Floats, floor: float, count: int) -> Ids:
    """Ids of the `count` best of the live tokens that reach the floor, ascending."""
    ids_n: Ids = (logits_V >= max(floor, float(_LOWEST))).nonzero()[0]
    if len(ids_n) <= count:
        return ids_n
    logits_n = logits_V[ids_n]
    last = np.sort(logits_n)[-count]
    is_best_n = logits_n > last
    is_best_n[(logits_n == last).nonzero()[0][: count - np.count_nonzero(is_best_n)]] = True
    best_n: Ids = ids_n[is_best_n]
    return best_n


def drop_below(logits_RV: torch.Tensor, floor_R1: torch.Tensor) -> torch.Tensor:
    """What is less than its row's floor goes to -inf, in place; NaN stays."""
    if not on_host(logits_RV):
        return logits_RV.masked_fill_(logits_RV < floor_R1, -torch.inf)
    host_RV = logits_RV.numpy()  # numpy compares with vector instructions, torch an element at a time
    drop_where(host_RV, host_RV < floor_R1.numpy())
    return logits_RV


def _keep_first_ties(logits_RV: torch.Tensor, counts_R1: torch.Tensor, last_R1: torch.Tensor) -> torch.Tensor:
    """keep_best where some row has more logits of the value last_R1, its last one to stay, than there is room for."""
    above_RV = logits_RV > last_R1
    tied_RV = logits_RV == last_R1
    room_R1 = counts_R1 - above_RV.sum(-1, keepdim=True)
    tied_RV &= tied_RV.cumsum(-1) <= room_R1
    return logits_RV.masked_fill_(~(above_RV | tied_RV), -torch.inf)
