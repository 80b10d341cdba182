"""From transformed logits to token ids: the argmax of greedy rows, one keyed draw for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm_samplers.randomness import uniform

# R: rows, V: vocabulary


def pick_best(logits_RV: torch.Tensor) -> torch.Tensor:
    """ids_R int64 of the largest logits, lowest id on ties. ValueError for a row whose largest logit is not finite."""
    ids_R = logits_RV.argmax(-1)
    _require(logits_RV.gather(1, ids_R.unsqueeze(1)).isfinite())
    return ids_R


def draw(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """ids_R int64 by inverse CDF: float32 softmax, float64 running sum in id order, the first id beyond u * total.

    ValueError when a drawn id has no positive probability (NaN, +inf or an empty row).
    """
    probs_RV = logits_RV.softmax(-1)
    coins = [uniform(row.seed, row.lane, row.position) for row in rows]
    ids_R = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=probs_RV.device))
    _require(probs_RV.gather(1, ids_R.unsqueeze(1)) > 0)
    return ids_R


def inverse_cdf(probs_RV: torch.Tensor, coins_R: torch.Tensor) -> torch.Tensor:
    """ids_R int64 for coins in (0, 1), float64. probs_RV need not be normalised."""
    running_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = running_RV[:, -1:].contiguous()
    # Rounding may lift u * total to total, beyond which there is no token.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(coins_R.unsqueeze(1) * total_R1, below_R1)
    ids_R = torch.searchsorted(running_RV, target_R1, right=True).squeeze(1)
    return ids_R.clamp_(max=probs_RV.shape[1] - 1)  # NaN rows land past the end


def _require(sound_R1: torch.Tensor) -> None:
    broken = torch.nonzero(~sound_R1.flatten()).flatten().tolist()
    if broken:
        raise ValueError(f"rows {broken}: no token with positive probability is left (NaN, inf or an emptied row)")
