"""RMS normalisation (https://arxiv.org/abs/1910.07467) of rows and of heads, computed in float32 inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm

# T: rows, D: features, C: heads, H: head dim

Norm = Callable[[torch.Tensor], torch.Tensor]


def wide_weight(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """offset + weight in float32."""
    return weight.float() if offset == 0.0 else offset + weight.float()


def row_norm(weight_D: torch.Tensor, eps: float, offset: float) -> Norm:
    """x_TD -> x / rms(x) * (offset + weight), in x's dtype. Gemma's offset is 1 and is added in float32."""
    shape = tuple(weight_D.shape)
    if offset == 0.0:
        return lambda x_TD: rms_norm(x_TD, shape, weight_D, eps)
    wide_D = wide_weight(weight_D, offset)
    return lambda x_TD: rms_norm(x_TD.float(), shape, wide_D, eps).to(x_TD.dtype)


def head_norm(parts: list[tuple[torch.Tensor, int]], eps: float, offset: float) -> Norm:
    """x_TCH -> each head normalised over H. `parts`: a weight_H and how many heads in a row share it."""
    weight_CH = torch.cat([weight_H.expand(num_heads, -1) for weight_H, num_heads in parts])
    shape = (weight_CH.shape[-1],)
    if offset == 0.0:
        return lambda x_TCH: rms_norm(x_TCH, shape, None, eps) * weight_CH
    wide_CH = wide_weight(weight_CH, offset)
    return lambda x_TCH: (rms_norm(x_TCH.float(), shape, None, eps) * wide_CH).to(x_TCH.dtype)
