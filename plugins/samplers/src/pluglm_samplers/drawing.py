"""From transformed logits to token ids: the argmax of greedy rows, one keyed draw for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm_samplers.randomness import uniform
from pluglm_samplers.ranking import is_best_by_row

# R: rows, V: vocabulary, C: tokens of positive probability

NO_TOKEN = -1


def pick_best(logits_RV: torch.Tensor) -> list[int]:
    """Ids of the largest logits, lowest id on ties; NO_TOKEN for a row whose largest logit is not finite."""
    ids_R = argmax(logits_RV)
    best_R = logits_RV.gather(1, ids_R.unsqueeze(1)).flatten().tolist()
    return [token if math.isfinite(best) else NO_TOKEN for token, best in zip(ids_R.tolist(), best_R, strict=True)]


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
        ids_R = torch.tensor([host_inverse_cdf(*one) for one in zip(probs_RV, coins, strict=True)])
    else:
        ids_R = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=probs_RV.device))
    drawn_R = probs_RV.gather(1, ids_R.unsqueeze(1)).flatten().tolist()
    return [token if prob > 0 else NO_TOKEN for token, prob in zip(ids_R.tolist(), drawn_R, strict=True)]


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


def require_tokens(ids: list[int]) -> list[int]:
    """The same ids, none of them NO_TOKEN. ValueError names the rows."""
    broken = [row for row, token in enumerate(ids) if token == NO_TOKEN]
    if broken:
        raise ValueError(f"rows {broken}: no token with positive probability is left (NaN, inf or an emptied row)")
    return ids
