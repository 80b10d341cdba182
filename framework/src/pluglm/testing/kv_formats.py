"""A KV format unlike ours, and a plain store of any format: what attention and backends under test are given."""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.kv_format import KVFormat, KVRow
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.testing.stores import PlainStore

# T: tokens, K: kv heads, H: head dim, C: bytes of a row, H / 2, G: scales of a row, 2

_MIDDLE = 8  # of a code of 4 bits


class NibbleKV(KVFormat):
    """4 bits a number, two in a byte, with a bfloat16 scale for each half of a head: no kernel does this by itself.

    x = (code - 8) * scale with codes 1 .. 15.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, device: str, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    def row(self, head_dim: int) -> KVRow:
        if head_dim % 4:
            raise IncompatibleError(f"4-bit KV has head dims that are multiples of 4, not {head_dim}")
        return KVRow(code_dtype=torch.uint8, num_codes=head_dim // 2, scale_dtype=torch.bfloat16, num_scales=2)

    def encode(self, x_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = _halves(x_TKH.float())
        scales = (halves.abs().amax(-1) / 7).clamp(min=1e-12).bfloat16()
        is_sound = x_TKH.isfinite().all(-1, keepdim=True)
        codes = (halves / scales.float().unsqueeze(-1)).round().clamp(-7, 7).flatten(-2).where(is_sound, 0.0)
        codes = (codes + _MIDDLE).to(torch.uint8)
        return codes[..., 0::2] | (codes[..., 1::2] << 4), scales.where(is_sound, float("nan"))

    def decode(self, codes_TKC: torch.Tensor, scales_TKG: torch.Tensor) -> torch.Tensor:
        codes_TKH = torch.stack((codes_TKC & 15, codes_TKC >> 4), dim=-1).flatten(-2)
        halves = _halves(codes_TKH.float() - _MIDDLE)
        return (halves * scales_TKG.float().unsqueeze(-1)).flatten(-2)

    def symmetric(self) -> None:
        return None


def _halves(x_TKH: torch.Tensor) -> torch.Tensor:
    """[T, K, 2, H / 2]."""
    return x_TKH.reshape(*x_TKH.shape[:2], 2, x_TKH.shape[2] // 2)


class EncodedStore(PlainStore):
    """A PartedStore: codes and scales a layer, filled with numbers that no sequence wrote."""

    def __init__(
        self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat, device: str = "cpu", fill: float = 0.0
    ) -> None:
        self.layout, self.kv_format = layout, kv_format
        num_slots = layout.num_blocks * layout.block_size
        self._layers: list[tuple[torch.Tensor, ...]] = []
        for layer in spec.layers:
            stale_SKH = torch.full((num_slots, layer.num_kv_heads, layer.head_dim), fill, device=device)
            codes, scales = kv_format.encode(stale_SKH)
            self._layers.append((codes, codes.clone(), scales, scales.clone()))
        self._keys = [parts[0] for parts in self._layers]
        self._values = [parts[1] for parts in self._layers]

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._layers[layer]

    def write(self, layer: int, slots: list[int], k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Keys and values of as many tokens, encoded."""
        keys, values, key_scales, value_scales = self._layers[layer]
        for codes, scales, x_TKH in ((keys, key_scales, k_TKH), (values, value_scales, v_TKH)):
            codes[slots], scales[slots] = self.kv_format.encode(x_TKH.to(codes.device))
