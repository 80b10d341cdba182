"""The contract of a KV format: how keys and values are stored when not in the run's dtype, and what holds them then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.interfaces.kv import KVLayout, KVStore
    from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec

KV_FORMAT_VERSION = 1

# T: tokens, K: kv heads, H: head dim, C: codes of a row, G: scales of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRow:
    """What is stored of a key, or of a value, of one kv head of one token.

    code_dtype: an integer one, as torch copies rows of others by index on some devices only.
    """

    code_dtype: torch.dtype
    num_codes: int
    scale_dtype: torch.dtype
    num_scales: int

    @property
    def num_bytes(self) -> int:
        return self.num_codes * self.code_dtype.itemsize + self.num_scales * self.scale_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricCodes:
    """Arithmetic that a kernel may do itself, in its own writes and reads: x = code * scale, one float32 scale a row.

    scale = max(largest |x| of the row / limit, least_scale), code = x / scale, clamped to +-limit and rounded to the
    nearest number of value_dtype (int8 or float8_e4m3fn), ties to even; divisions are float32's, and zero is +0. A row
    that holds NaN or infinity has a scale of NaN and codes of 0. KVRow.code_dtype holds the bits of value_dtype.
    """

    value_dtype: torch.dtype
    limit: float
    least_scale: float


class KVFormat(Component, Protocol):
    """Built as cls(config, device: str, dtype: torch.dtype) for a run, before any KV is allocated.

    Every row is encoded by itself, so what is stored of a token depends on nothing but its key and value: chunks, block
    sizes and batch mates change no bit. A row that holds NaN or infinity decodes to no finite number, so that a faulty
    step is noticed behind the format as it would be without it.
    """

    def row(self, head_dim: int) -> KVRow:
        """IncompatibleError when heads of this size cannot be stored."""
        ...

    def encode(self, x_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes_TKC, scales_TKG) of keys or values in the run's dtype, which are not changed."""
        ...

    def decode(self, codes_TKC: torch.Tensor, scales_TKG: torch.Tensor) -> torch.Tensor:
        """x_TKH float32, in new memory. Any T, in any order: rows are read in pieces."""
        ...

    def symmetric(self) -> SymmetricCodes | None:
        """What encode and decode are, to the bit, where that is this arithmetic: writes may then be fused with it."""
        ...


@runtime_checkable
class FormatBackend(Protocol):
    """Optional ability of a Backend: KV storage in a format."""

    def allocate_encoded_kv(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat) -> KVStore:
        """As allocate_kv. What holds tensors is a PartedStore, whose keys and values are codes [slots, K, C]."""
        ...


@runtime_checkable
class PartedStore(Protocol):
    """Optional ability of a KVStore, and there when it holds more of a layer than keys and values."""

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Keys and values, as `keys` and `values` give them; in a format then their scales, each [slots, K, G].

        All of them are live storage, and whoever moves rows moves those of every part.
        """
        ...


PART_NAMES = ("keys", "values", "key_scales", "value_scales")


def stored_parts(store: KVStore, layer: int) -> Sequence[torch.Tensor]:
    """Every tensor that a store has of a layer, slots first, in the order of PART_NAMES."""
    return store.parts(layer) if isinstance(store, PartedStore) else (store.keys(layer), store.values(layer))


def token_bytes(layer: LayerSpec, value_bytes: int, kv_format: KVFormat | None) -> int:
    """Of one token's key and value in one layer. value_bytes: of a number in the run's dtype."""
    head_bytes = layer.head_dim * value_bytes if kv_format is None else kv_format.row(layer.head_dim).num_bytes
    return 2 * layer.num_kv_heads * head_bytes
