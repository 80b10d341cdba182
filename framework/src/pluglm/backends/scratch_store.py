"""Keys and values with one block more than the run knows of, for rows that only fill a batch up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kv.store import TensorKVStore

MOST_SCRATCH_TOKENS = 256  # of a block; larger ones are whole sequences of a contiguous manager, and memory


def has_scratch(layout: KVLayout) -> bool:
    return not layout.groups and layout.block_size <= MOST_SCRATCH_TOKENS


class ScratchKVStore:
    """Looks like a store of `layout`. `whole` is the same memory and the scratch block, which is the last one.

    The KV manager cannot hand that block out, nor does anything that reads `layout` see it.
    """

    def __init__(
        self, layout: KVLayout, spec: ModelSpec, device: str, dtype: torch.dtype, kv_format: KVFormat | None = None
    ) -> None:
        self.layout = layout
        self.scratch_block = layout.num_blocks
        more = replace(layout, num_blocks=layout.num_blocks + 1)
        self.whole = TensorKVStore(more, spec, device, dtype, kv_format=kv_format)
        num_slots, layers = layout.num_blocks * layout.block_size, range(len(spec.layers))
        self._parts = [tuple(one[:num_slots] for one in self.whole.parts(layer)) for layer in layers]

    def keys(self, layer: int) -> torch.Tensor:
        return self._parts[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        return self._parts[layer][1]

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._parts[layer]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.whole.copy_blocks(copies)
