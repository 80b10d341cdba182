"""The two ways to apply a row-wise function: all rows at once, or in tiles of one fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RowFunction = Callable[..., tuple[torch.Tensor, ...]]

_ALIGNMENT = 64  # bytes, of a cache line and of the widest vector register


def whole_rows(function: RowFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Calls the function once. The fast way; a row's last bits may depend on how many rows there are."""
    return function(*tensors)


@dataclass(frozen=True, slots=True)
class TiledRows:
    """Calls the function on tiles of exactly num_rows rows, the last one filled up with zeros.

    Matrix libraries choose their kernel, and so the order of additions, by shape and alignment. With both fixed a row
    gets the same bits in any batch and at any place in a tile; torch's vectorised elementwise kernels keep that up for
    widths that are multiples of 4 and at most 2 threads (else a tile is split inside a row, and the scalar rest of
    e.g. silu rounds differently).
    """

    num_rows: int = 16

    def __call__(self, function: RowFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        num_rows = tensors[0].shape[0]
        starts = range(0, max(num_rows, 1), self.num_rows)
        tiles = [function(*(self._tile(tensor, start) for tensor in tensors)) for start in starts]
        if len(tiles) == 1:
            return tuple(result[:num_rows] for result in tiles[0])
        return tuple(torch.cat(parts)[:num_rows] for parts in zip(*tiles, strict=True))

    def _tile(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        tile = tensor[start : start + self.num_rows]
        if tile.shape[0] == self.num_rows and tile.is_contiguous() and tile.data_ptr() % _ALIGNMENT == 0:
            return tile
        padded = tensor.new_zeros((self.num_rows, *tensor.shape[1:]))
        padded[: tile.shape[0]] = tile
        return padded
