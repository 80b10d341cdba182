"""A linear layer whose weight exists only a tile at a time. Knows nothing of how weights are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

# R: rows, N: output features, K: input features, n: output features of one tile

TILE_N = 1024  # bounds the full-precision copy to a tile; smaller tiles cost more calls, larger ones leave the cache


def row_tiles(num_outputs: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each tile; starts are multiples of TILE_N."""
    for start in range(0, num_outputs, TILE_N):
        yield start, min(start + TILE_N, num_outputs)


def tiled_linear(x_RK: torch.Tensor, num_outputs: int, tile: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """x @ weight.T in x's dtype. tile(start, end) -> float32 weight_nK of output features start .. end."""
    out_RN = x_RK.new_empty(x_RK.shape[0], num_outputs)
    for start, end in row_tiles(num_outputs):
        out_RN[:, start:end] = functional.linear(x_RK, tile(start, end).to(x_RK.dtype))
    return out_RN
