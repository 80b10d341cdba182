"""From transformed logits to token ids: the argmax of greedy rows, one keyed draw for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm_samplers.randomness import uniform
from pluglm_samplers.ranking import SHORT, is_best_by_row

# R: rows, V: vocabulary, C: tokens of positive probability


def pick_best(logits_RV: torch.Tensor) -> list[int]:
    """Ids of the largest logits, lowest id on ties; NO_TOKEN for a row whose largest logit is not finite."""
    if logits_RV.device.type != "cpu":
        ids_R = logits_RV.argmax(-1)
        is_finite_R = logits_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1).isfinite()
        return list(ids_R.where(is_finite_R, NO_TOKEN).tolist())
    host_RV = logits_RV.numpy()  # which finds them in a tenth of the time of torch, and starts no threads
    host_ids_R = host_RV.argmax(-1)
    is_finite = np.isfinite(host_RV[np.arange(len(host_RV)), host_ids_R])
    return list(host_ids_R.tolist() if is_finite.all() else np.where(is_finite, host_ids_R, NO_TOKEN).tolist())


def draw(
    logits_RV: torch.Tensor, rows: Sequence[SampleRow], coin: Callable[[int, int, int], float] = uniform
) -> list[int]:
    """Ids by inverse CDF: float32 softmax, float64 running sum in id order, the first id beyond u * total.

    coin: `uniform`, or what gives the same. NO_TOKEN where that id has no positive probability (NaN, +inf or an empty
    row).
    """
    probs_RV = logits_RV.softmax(-1)
    coins = [coin(row.seed, row.lane, row.position) for row in rows]
    if probs_RV.device.type != "cpu":
        ids_R = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=probs_RV.device))
        return list(ids_R.where(probs_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1) > 0, NO_TOKEN).tolist())
    if is_best_by_row(probs_RV):
        host_RV = probs_RV.numpy()
        found = [host_inverse_cdf(*one) for one in zip(host_RV, coins, strict=True)]
        return [token if host_V[token] > 0 else NO_TOKEN for host_V, token in zip(host_RV, found, strict=True)]
    ids = _host_inverse_cdfs(probs_RV, coins)
    is_drawn = probs_RV.numpy()[np.arange(len(ids)), ids] > 0
    return list(ids.tolist() if is_drawn.all() else np.where(is_drawn, ids, NO_TOKEN).tolist())


def inverse_cdf(probs_RV: torch.Tensor, coins_R: torch.Tensor) -> torch.Tensor:
    """ids_R int64 for coins in (0, 1), float64. probs_RV need not be normalised."""
    running_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = running_RV[:, -1:].contiguous()
    # Rounding may lift u * total to total, beyond which there is no token.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(coins_R.unsqueeze(1) * total_R1, below_R1)
    ids_R = torch.searchsorted(running_RV, target_R1, right=True).squeeze(1)
    return ids_R.clamp_(max=probs_RV.shape[1] - 1)  # NaN rows land past the end


def _host_inverse_cdfs(probs_RV: torch.Tensor, coins: list[float]) -> np.ndarray:
    """`inverse_cdf` on the host, by as few calls as possible: ids_R."""
    running_RV: np.ndarray = probs_RV.cumsum(-1, dtype=torch.float64).numpy()
    total_R = running_RV[:, -1]
    target_R = np.minimum(np.array(coins) * total_R, np.nextafter(total_R, 0.0))
    ids_R: np.ndarray = (running_RV > target_R[:, None]).argmax(-1)
    return ids_R


def host_inverse_cdf(probs_V: np.ndarray, coin: float) -> int:
    """`inverse_cdf` of one row: what fits into a core's cache, and of a long row no sum over tokens without mass."""
    ids_C = None
    if len(probs_V) > SHORT:
        is_positive_V = probs_V > 0
        num_positive = np.count_nonzero(is_positive_V)
        if not num_positive:
            return 0  # NaN, or a row without mass
        if num_positive < len(probs_V) // 4:
            ids_C = is_positive_V.nonzero()[0]
            probs_V = probs_V[ids_C]
        running_C = torch.from_numpy(probs_V).cumsum(-1, dtype=torch.float64).numpy()  # numpy takes three times as long
    else:
        running_C = probs_V.cumsum(dtype=np.float64)
    total = float(running_C[-1])
    index = int(running_C.searchsorted(min(coin * total, math.nextafter(total, 0.0)), side="right"))
    index = min(index, len(running_C) - 1)  # NaN lands past the end
    return index if ids_C is None else int(ids_C[index])
