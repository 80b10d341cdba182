"""From transformed logits to token ids: the argmax of greedy rows, one keyed draw for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm_samplers.randomness import uniform
from pluglm_samplers.ranking import is_best_by_row

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


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """ids_R int64, lowest id on ties. On the host by numpy, which finds them in a tenth of the time of torch."""
    if logits_RV.device.type != "cpu":
        return logits_RV.argmax(-1)
    return torch.from_numpy(logits_RV.numpy().argmax(-1))


def draw(
    logits_RV: torch.Tensor, rows: Sequence[SampleRow], coin: Callable[[int, int, int], float] = uniform
) -> list[int]:
    """Ids by inverse CDF: float32 softmax, float64 running sum in id order, the first id beyond u * total.

    coin: `uniform`, or what gives the same. NO_TOKEN where that id has no positive probability (NaN, +inf or an empty
    row).
    """
    probs_RV = logits_RV.softmax(-1)
    coins = [coin(row.seed, row.lane, row.position) for row in rows]
    if is_best_by_row(probs_RV):
        ids = [host_inverse_cdf(*one) for one in zip(probs_RV, coins, strict=True)]
    else:
        ids_R = inverse_cdf(probs_RV, torch.from_numpy(np.array(coins)).to(probs_RV.device))
        if probs_RV.device.type != "cpu":
            return ids_R.where(probs_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1) > 0, NO_TOKEN).tolist()
        ids = ids_R.tolist()
    is_drawn = (probs_RV.numpy()[np.arange(len(ids)), ids] > 0).tolist()
    return [token if one else NO_TOKEN for token, one in zip(ids, is_drawn, strict=True)]


def inverse_cdf(probs_RV: torch.Tensor, coins_R: torch.Tensor) -> torch.Tensor:
    """ids_R int64 for coins in (0, 1), float64. probs_RV need not be normalised."""
    running_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = running_RV[:, -1:].contiguous()
    # Rounding may lift u * total to total, beyond which there is no token.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(coins_R.unsqueeze(1) * total_R1, below_R1)
    ids_R = torch.searchsorted(running_RV, target_R1, right=True).squeeze(1)
    return ids_R.clamp_(max=probs_RV.shape[1] - 1)  # NaN rows land past the end


def host_inverse_cdf(probs_V: torch.Tensor, coin: float) -> int:
    """`inverse_cdf` of one row, on the host: what fits into a core's cache, and no sum over tokens without mass."""
    is_positive_V = probs_V.numpy() > 0
    if not is_positive_V.any():
        return 0  # NaN, or a row without mass
    ids_C = None
    if np.count_nonzero(is_positive_V) < len(probs_V) // 4:
        ids_C = is_positive_V.nonzero()[0]
        running_C = probs_V.numpy()[ids_C].cumsum(dtype=np.float64)
    else:
        running_C = probs_V.cumsum(-1, dtype=torch.float64).numpy()
    target = min(coin * running_C[-1], np.nextafter(running_C[-1], 0.0))
    index = running_C.searchsorted(target, side="right")
    return int(index if ids_C is None else ids_C[index])
