"""Keys and values of one layer as kernels in torch write and read them, whatever format they are stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat, PartedStore
from pluglm.kernel.interfaces.model import LayerSpec

# T: tokens of the flat batch, S: slots that are read, K: kv heads, H: head dim, C: codes of a row, G: its scales


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Reads as a tensor [slots, K, H] does, in float32, and decodes no more than what is read."""

    kv_format: KVFormat
    codes: torch.Tensor
    scales: torch.Tensor

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """[S, K, H] of these slots; dim is 0."""
        codes_SKC, scales_SKG = (part.index_select(dim, index) for part in (self.codes, self.scales))
        return self.kv_format.decode(codes_SKC, scales_SKG)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """[S, K, H] of `length` slots from `start` on; dim is 0."""
        codes_SKC, scales_SKG = (part.narrow(dim, start, length) for part in (self.codes, self.scales))
        return self.kv_format.decode(codes_SKC, scales_SKG)


Rows = torch.Tensor | EncodedRows


def write_rows(
    layer: LayerSpec,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slots_T: torch.Tensor,
    kv: KVStore,
    kv_format: KVFormat | None,
) -> tuple[Rows, Rows]:
    """Stores the new tokens of a layer; returns all of its keys and values, to be read from."""
    if kv_format is None:
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        keys.index_copy_(0, slots_T, k_TKH)
        values.index_copy_(0, slots_T, v_TKH)
        return keys, values
    keys, values, key_scales, value_scales = cast(PartedStore, kv).parts(layer.index)
    rows = EncodedRows(kv_format, keys, key_scales), EncodedRows(kv_format, values, value_scales)
    for one, x_TKH in zip(rows, (k_TKH, v_TKH), strict=True):
        codes_TKC, scales_TKG = kv_format.encode(x_TKH)
        one.codes.index_copy_(0, slots_T, codes_TKC)
        one.scales.index_copy_(0, slots_T, scales_TKG)
    return rows
