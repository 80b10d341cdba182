"""A plain KV store: one pair of tensors a layer, written and read by slot. What backends' stores are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import ModelSpec


class PlainStore:
    """[num_blocks * block_size, K, H] a layer for keys and for values, filled with `fill`."""

    def __init__(
        self, layout: KVLayout, spec: ModelSpec, dtype: torch.dtype, device: str = "cpu", fill: float = 0.0
    ) -> None:
        self.layout = layout
        slots = layout.num_blocks * layout.block_size
        shapes = [(slots, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        self._keys = [torch.full(shape, fill, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.full(shape, fill, dtype=dtype, device=device) for shape in shapes]

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        size = self.layout.block_size
        sources = [slot for source, _ in copies for slot in range(source * size, source * size + size)]
        targets = [slot for _, target in copies for slot in range(target * size, target * size + size)]
        for tensor in [*self._keys, *self._values]:
            tensor[targets] = tensor[sources]
