"""What is done to attention scores between the two products: who sees whom, and the soft cap."""

from __future__ import annotations

import torch

# Q: queries, S: keys


def visible(queries_Q: torch.Tensor, keys_S: torch.Tensor, window: int | None) -> torch.Tensor:
    """mask_QS bool from positions: a query sees itself and earlier keys, the last `window` of them."""
    distance_QS = queries_Q[:, None] - keys_S[None, :]
    mask_QS = distance_QS >= 0
    return mask_QS if window is None else mask_QS & (distance_QS < window)


def capped(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """scores squeezed into (-soft_cap, soft_cap), as in Gemma 2 (2024, arXiv:2408.00118, section 2)."""
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
