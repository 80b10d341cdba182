"""From transformed logits to token ids: the argmax of greedy rows, one keyed draw for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.verification.drawing import inverse_cdf
from pluglm.verification.randomness import uniform
from pluglm_samplers.blocks import SHORT, Floats, Wide, few_live, on_host, running_sums

# R: rows, V: vocabulary, C: tokens of a row that are looked at, S: stretches of a row

_STRETCH = 256
_MOST_LIVE = 8192  # tokens of which a running sum takes less than the masses of a whole row


def pick_best(logits_RV: torch.Tensor) -> list[int]:
    """Ids of the largest logits, lowest id on ties; NO_TOKEN for a row whose largest logit is not finite."""
    if not on_host(logits_RV):
        ids_R = logits_RV.argmax(-1)
        is_finite_R = logits_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1).isfinite()
        return list(ids_R.where(is_finite_R, NO_TOKEN).tolist())
    host_RV = logits_RV.numpy()  # which finds them in a tenth of the time of torch, and starts no threads
    best = enumerate(host_RV.argmax(-1).tolist())
    return [one if math.isfinite(host_RV.item(row, one)) else NO_TOKEN for row, one in best]


def draw(
    logits_RV: torch.Tensor, rows: Sequence[SampleRow], coin: Callable[[int, int, int], float] = uniform
) -> list[int]:
    """Ids by inverse CDF: float32 masses, float64 running sum in id order, the first id beyond u * total.

    coin: `uniform`, or what gives the same. NO_TOKEN where that id has no positive probability (NaN, +inf or an empty
    row).
    """
    coins = [coin(row.seed, row.lane, row.position) for row in rows]
    if not on_host(logits_RV):
        probs_RV = logits_RV.softmax(-1)
        ids_R = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=probs_RV.device))
        ids_R.clamp_(max=probs_RV.shape[1] - 1)  # NaN rows land past the end
        return list(ids_R.where(probs_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1) > 0, NO_TOKEN).tolist())
    return host_draw(logits_RV.numpy(), coins)


def final_probabilities(logits_RV: torch.Tensor) -> torch.Tensor:
    """probs_RV that `draw` draws from; all zero for a row that it gives NO_TOKEN for."""
    probs_RV = logits_RV.softmax(-1)
    return probs_RV.masked_fill_(~logits_RV.amax(-1, keepdim=True).isfinite(), 0.0)


def one_hot_rows(ids: Sequence[int], like_RV: torch.Tensor) -> torch.Tensor:
    """float32 rows with all mass on these ids; all zero for NO_TOKEN."""
    ids_R1 = torch.tensor(ids, device=like_RV.device).unsqueeze(1)
    mass_R1 = (ids_R1 != NO_TOKEN).float()
    return like_RV.new_zeros((len(ids), like_RV.shape[1])).scatter_(1, ids_R1.clamp(min=0), mass_R1)


def host_draw(logits_RV: Floats, coins: Sequence[float]) -> list[int]:
    """The same on the host. A row's masses are the probabilities but for a factor, see `blocks.masses`."""
    if len(coins) == 1 and logits_RV.shape[1] <= SHORT:
        return [_draw_row(logits_RV[0], coins[0])]
    with np.errstate(all="ignore"):
        if logits_RV.shape[1] <= SHORT:
            return _draw_short(logits_RV, np.array(coins))
        return [_draw_long(logits_V, coin) for logits_V, coin in zip(logits_RV, coins, strict=True)]


def _draw_short(logits_RC: Floats, coins_R: Wide) -> list[int]:
    best_R1 = logits_RC.max(-1, keepdims=True)
    running_RC = running_sums(np.exp(logits_RC - best_R1))
    total_R1 = running_RC[:, -1:]
    target_R1 = np.minimum(coins_R[:, None] * total_R1, np.nextafter(total_R1, 0.0))
    ids_R = (running_RC > target_R1).argmax(-1)
    is_finite_R = np.isfinite(best_R1[:, 0])
    return list((ids_R if is_finite_R.all() else np.where(is_finite_R, ids_R, NO_TOKEN)).tolist())


def _draw_row(logits_C: Floats, coin: float) -> int:
    """The same of one row, in fewer calls."""
    best = logits_C.max()
    if not math.isfinite(best):
        return NO_TOKEN
    running_C = np.exp(logits_C - best).cumsum(dtype=np.float64)
    total = float(running_C[-1])
    return int(running_C.searchsorted(min(coin * total, math.nextafter(total, 0.0)), side="right"))


def _draw_long(logits_V: Floats, coin: float) -> int:
    """By its live tokens, if they are few. Else the running sum is that of stretches, then of tokens in a stretch."""
    ids_C = few_live(logits_V, _MOST_LIVE)
    if ids_C is not None:
        place = _draw_row(logits_V[ids_C], coin) if len(ids_C) else NO_TOKEN
        return place if place == NO_TOKEN else int(ids_C[place])
    mass_V = np.exp(logits_V - logits_V.max()).astype(np.float64)
    starts_S = np.arange(0, len(mass_V), _STRETCH)
    running_S = np.add.reduceat(mass_V, starts_S).cumsum()
    total = float(running_S[-1])
    if not total > 0:  # of a NaN or +inf in the row
        return NO_TOKEN
    target = min(coin * total, math.nextafter(total, 0.0))
    stretch = int(running_S.searchsorted(target, side="right"))
    first = int(starts_S[stretch])
    mass_C = mass_V[first : first + _STRETCH]
    running_C = mass_C.cumsum() + (running_S[stretch - 1] if stretch else 0.0)
    place = int(running_C.searchsorted(target, side="right"))
    if place == len(mass_C):  # the two sums of a stretch may differ in their last bit
        place = int(mass_C.nonzero()[0][-1])
    return first + place
