"""Keys and values as plain tensors, and the scales of a format beside them. Knows slots, not sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec

Part = tuple[tuple[int, int], torch.dtype]  # [kv heads, numbers] of a slot


class TensorKVStore:
    """Storage is uninitialised: pages that no token is written to cost no memory, and are never read.

    A layer has as many blocks as its group of the layout. empty: makes each tensor, where a backend has better memory.
    kv_format: None keeps keys and values in `dtype`.
    """

    def __init__(
        self,
        layout: KVLayout,
        spec: ModelSpec,
        device: str,
        dtype: torch.dtype,
        empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        kv_format: KVFormat | None = None,
    ) -> None:
        self.layout = layout
        everything = KVGroup(layers=tuple(range(len(spec.layers))), num_blocks=layout.num_blocks)
        self._groups = layout.groups or (everything,)
        num_slots = {one: group.num_blocks * layout.block_size for group in self._groups for one in group.layers}
        make = empty or partial(_empty, device)
        self._parts = [
            tuple(make((num_slots[layer.index], *shape), kind) for shape, kind in _parts(layer, dtype, kv_format))
            for layer in spec.layers
        ]

    def keys(self, layer: int) -> torch.Tensor:
        return self._parts[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        return self._parts[layer][1]

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._parts[layer]

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
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._parts[0][0].device)
        for stored in (one for layer in group.layers for one in self._parts[layer]):
            blocks = stored.view(group.num_blocks, self.layout.block_size, *stored.shape[1:])
            # index_select makes the copy of all sources that a chain of pairs needs.
            blocks.index_copy_(0, pairs[:, 1], blocks.index_select(0, pairs[:, 0]))


def _parts(layer: LayerSpec, dtype: torch.dtype, kv_format: KVFormat | None) -> Iterator[Part]:
    """Of keys and values, then of their scales, as PartedStore has them."""
    if kv_format is None:
        yield from [((layer.num_kv_heads, layer.head_dim), dtype)] * 2
        return
    row = kv_format.row(layer.head_dim)
    yield from [((layer.num_kv_heads, row.num_codes), row.code_dtype)] * 2
    yield from [((layer.num_kv_heads, row.num_scales), row.scale_dtype)] * 2


def _empty(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype)
