"""Small helpers of the logits steps: one parameter per row as a tensor, and arithmetic that stays finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# R: rows, V: vocabulary

FLOAT32 = torch.finfo(torch.float32)


def column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    """values_R1 float32, clamped to what float32 holds: 1e300 must become the largest number, not infinity."""
    clamped = [min(max(value, FLOAT32.min), FLOAT32.max) for value in values]
    return torch.tensor(clamped, dtype=torch.float32, device=device).unsqueeze(1)


def keep_finite(changed_RV: torch.Tensor, before_RV: torch.Tensor) -> torch.Tensor:
    """changed_RV with overflow clamped to the largest float32, and -inf wherever before_RV is -inf."""
    return changed_RV.clamp_(FLOAT32.min, FLOAT32.max).masked_fill_(before_RV == -torch.inf, -torch.inf)
