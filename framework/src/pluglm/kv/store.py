"""Keys and values as plain tensors, one pair a layer. Knows slots, not sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kernel.interfaces.model import ModelSpec


class TensorKVStore:
    """Storage is uninitialised: pages that no token is written to cost no memory, and are never read.

    A layer has as many blocks as its group of the layout. empty: makes each tensor, where a backend has better memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        spec: ModelSpec,
        device: str,
        dtype: torch.dtype,
        empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self.layout = layout
        everything = KVGroup(layers=tuple(range(len(spec.layers))), num_blocks=layout.num_blocks)
        self._groups = layout.groups or (everything,)
        num_slots = {one: group.num_blocks * layout.block_size for group in self._groups for one in group.layers}
        shapes = [(num_slots[layer.index], layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        make = empty or partial(_empty, device)
        self._keys = [make(shape, dtype) for shape in shapes]
        self._values = [make(shape, dtype) for shape in shapes]

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        first = 0
        for group in self._groups:
            stop = first + group.num_blocks
            self._copy_blocks(group, [(one - first, other - first) for one, other in copies if first <= one < stop])
            first = stop

    def _copy_blocks(self, group: KVGroup, copies: list[tuple[int, int]]) -> None:
        """Within the layers of one group, blocks counted from its first."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._keys[0].device)
        for stored in (tensors[layer] for tensors in (self._keys, self._values) for layer in group.layers):
            blocks = stored.view(group.num_blocks, self.layout.block_size, *stored.shape[1:])
            # index_select makes the copy of all sources that a chain of pairs needs.
            blocks.index_copy_(0, pairs[:, 1], blocks.index_select(0, pairs[:, 0]))


def _empty(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype)
