"""Keeps exactly the n best tokens of each row; ties rank by token id, lowest first. Knows no sampling parameter."""

from __future__ import annotations

import torch

# R: rows, V: vocabulary, k: the largest of counts_R


def keep_best(logits_RV: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """All but the counts_R (int64, 1 .. V) best tokens of each row go to -inf, in place."""
    best_Rk = torch.topk(logits_RV, int(counts_R.max()), dim=-1).values
    last_R1 = best_Rk.gather(1, counts_R.unsqueeze(1) - 1)
    above_RV = logits_RV > last_R1
    tied_RV = logits_RV == last_R1
    room_R1 = counts_R.unsqueeze(1) - above_RV.sum(-1, keepdim=True)
    if bool((tied_RV.sum(-1, keepdim=True) > room_R1).any()):
        tied_RV &= tied_RV.cumsum(-1) <= room_R1
    return logits_RV.masked_fill_(~(above_RV | tied_RV), -torch.inf)
