"""Keeps exactly the n best tokens of each row; ties rank by token id, lowest first. Knows no sampling parameter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from pluglm_samplers.blocks import SHORT, Floats, Ids, drop_where, on_host

# R: rows, V: vocabulary, C: values of a row that are looked at, k: the largest of counts_R or one more, G: groups,
# S: small groups, into which groups are cut, D: tokens of a small group, m: small groups of all rows with a candidate,
# n: candidates of all rows

# Groups come in multiples of the first number, and as many for each token that is kept as the second says; where a
# group would have fewer tokens than the third, a row is sorted. Small groups have the fourth or a few more: of each
# with a candidate all tokens are looked at, in pages of memory far apart.
_GROUPS, _GROUPS_EACH, _MIN_DEPTH, _DEPTH = 512, 16, 2, 12
_FOR_THREADS = 1 << 20  # logits, of which it pays to find the largest by torch, which has threads and a call's cost
_MANY_GROUPS = 4  # small ones, for each token that is kept; more than so many tie with the last one
_LOWEST = np.finfo(np.float32).min  # no masked token reaches it
# (l - max l) / T is rounded twice, each time by half an eps of |l| + |max l| at most. What this is too little for costs
# time and no more: `fused` looks whether it was enough.
_SLACK = np.float32(8 * np.finfo(np.float32).eps)


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
        best = find_best(logits_V[None], count)
        if not math.isfinite(best.highest_R[0]):
            continue
        ids_n = best.ids_n
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


class Best(NamedTuple):
    """rows_n, ids_n, ascending: of each row the best live tokens and some more.

    highest_R: a row's best logit, NaN for a row with NaN; where it is not finite nothing else is said of that row.
    floor_R: `count` tokens reach it, if so many live. below_R: no token above it is left out; infinite where no such
    number is known, and -inf where it is known that no live token is left out.
    """

    rows_n: Ids
    ids_n: Ids
    highest_R: Floats
    floor_R: Floats
    below_R: Floats


def find_best(logits_RV: Floats, count: int, slack: bool = False) -> Best:
    """Of every row the `count` (1 .. V) best live tokens, and some more. slack: those a few roundings below them, too.

    No row is sorted where `count` is a small part of V: it is split into groups, and the count-th largest of their
    best logits is a floor that `count` tokens reach, so whatever is below it is not among the best. A group is every
    G-th token, so that large logits side by side do not fall into one. A row with many ties gives `count` tokens.
    """
    num_rows, size = logits_RV.shape
    num_groups = _GROUPS * -(-_GROUPS_EACH * count // _GROUPS)
    if size // num_groups < _MIN_DEPTH:
        return _sort_for_best(logits_RV, count)
    num_small = num_groups * max(1, size // num_groups // _DEPTH)
    depth = size // num_small
    grouped = depth * num_small
    values_RDS, rest_RC = logits_RV[:, :grouped].reshape(num_rows, depth, num_small), logits_RV[:, grouped:]
    best_RS = _largest(values_RDS)
    sorted_RG = np.sort(best_RS.reshape(num_rows, -1, num_groups).max(1), axis=-1)  # partition stalls over ties
    highest_R = np.maximum(sorted_RG[:, -1], rest_RC.max(-1, initial=-np.inf))
    floor_R = sorted_RG[:, num_groups - count]
    least_R1 = _lowered(floor_R, highest_R if slack else None)[:, None]
    rows_m, groups_m = np.divmod(np.flatnonzero(best_RS >= least_R1), num_small)
    is_tied_R = np.bincount(rows_m, minlength=num_rows) > _MANY_GROUPS * count
    below_R = np.where(least_R1[:, 0] > _LOWEST, least_R1[:, 0], -np.inf).astype(np.float32)
    below_R[is_tied_R] = np.inf
    tied = is_tied_R.nonzero()[0].tolist()
    of_tied = [row * size + _best_above(logits_RV[row], float(least_R1[row, 0]), count) for row in tied]
    if tied:
        rows_m, groups_m = rows_m[~is_tied_R[rows_m]], groups_m[~is_tied_R[rows_m]]
        least_R1[is_tied_R] = np.nan  # which nothing reaches, so that below none is found
    found_n, depths_n = (values_RDS[rows_m, :, groups_m] >= least_R1[rows_m]).nonzero()
    rest_rows_n, rest_ids_n = (rest_RC >= least_R1).nonzero()
    places_n = rows_m[found_n] * size + depths_n * num_small + groups_m[found_n]
    places_n = np.concatenate((places_n, rest_rows_n * size + grouped + rest_ids_n, *of_tied))
    places_n.sort()
    return Best(*np.divmod(places_n, size), highest_R, floor_R, below_R)


def _largest(values_RDS: Floats) -> Floats:
    """best_RS; NaN where there is one."""
    in_threads = values_RDS.size >= _FOR_THREADS
    best_RS: Floats = torch.from_numpy(values_RDS).amax(1).numpy() if in_threads else values_RDS.max(1)
    return best_RS


def _sort_for_best(logits_RV: Floats, count: int) -> Best:
    """find_best by sorting whole rows."""
    size = logits_RV.shape[1]
    sorted_RV = np.sort(logits_RV, axis=-1)
    floor_R = sorted_RV[:, size - count].copy()
    found = [row * size + _best_above(logits_RV[row], one, count) for row, one in enumerate(floor_R.tolist())]
    places_n = np.concatenate(found)
    below_R = np.full(len(floor_R), np.inf, dtype=np.float32)
    return Best(*np.divmod(places_n, size), sorted_RV[:, -1], floor_R, below_R)


def _lowered(floor_R: Floats, highest_R: Floats | None) -> Floats:
    """floor_R, lower by some roundings if highest_R is given, and so high that no masked token reaches it."""
    with np.errstate(all="ignore"):  # of rows with infinite logits or NaN, which nobody takes
        slack_R = 0.0 if highest_R is None else _SLACK * (np.abs(floor_R) + np.abs(highest_R))
        lowered_R: Floats = np.maximum(floor_R - slack_R, _LOWEST, dtype=np.float32)
    return lowered_R


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
