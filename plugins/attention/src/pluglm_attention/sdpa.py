"""The fast attention on torch's scaled_dot_product_attention. Knows which views keep torch on its quick paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.component import DETERMINISTIC, KV_FORMATS, BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.bounds import ROUNDED_WEIGHTS
from pluglm_attention.rows import Rows, write_rows
from pluglm_attention.sdpa_plan import DecodePart, KeyRange, Part, SegmentPart, plan_parts

# T: tokens of the flat batch, B: sequences of a decode batch, Q: queries of one segment, S: keys
# N: query heads, K: kv heads, G: query heads of a kv head (N = K * G), H: head dim


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """slots_T: where new keys and values go; parts: the calls of a layer, by its window."""

    slots_T: torch.Tensor
    parts: dict[int | None, tuple[Part, ...]]


class SdpaAttention(Attention):
    """torch's fused attention kernels.

    FlashAttention (Dao et al., 2022, arXiv:2205.14135) as torch ships it, with the query heads of a kv head grouped
    as rows or as a broadcast batch: torch's own enable_gqa copies keys, and is slow in bfloat16 on a CPU.

    Refuses models with a soft cap, which torch cannot apply, and deterministic runs. With a KV format it decodes the
    keys of one call, and computes in float32.
    """

    interface_version = 1
    Config = ComponentConfig
    ERROR_BOUNDS: ClassVar[Mapping[str, float]] = ROUNDED_WEIGHTS

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        if capped := [layer.index for layer in context.spec.layers if layer.soft_cap is not None]:
            raise IncompatibleError(
                f"attention 'sdpa' cannot run {context.spec.family}: torch's sdpa has no soft cap, which layer "
                f"{capped[0]} needs; use attention 'naive'"
            )
        self._windows = {layer.window for layer in context.spec.layers}
        self._kv_format = context.kv_format
        self._dtype = getattr(torch, context.dtype) if context.kv_format is None else torch.float32

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        reason = "torch's sdpa picks its blocks by shape, so a row's bits depend on its batch; use attention 'naive'"
        return Capabilities(provides=frozenset({KV_FORMATS}), refuses={DETERMINISTIC: reason})

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        device = batch.slots_T.device
        parts = {w: plan_parts(batch.segments, batch.block_size, w, device, self._dtype) for w in self._windows}
        return SdpaPlan(batch.slots_T, parts)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: SdpaPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = write_rows(layer, k_TKH, v_TKH, plan.slots_T, kv, self._kv_format)
        parts, wide_TNH = plan.parts[layer.window], q_TNH.to(self._dtype)
        if len(parts) == 1:
            return _attend(layer, wide_TNH, keys, values, parts[0]).to(q_TNH.dtype)
        out_TNH = torch.empty_like(q_TNH)
        for part in parts:
            out_TNH[part.rows] = _attend(layer, wide_TNH[part.rows], keys, values, part)
        return out_TNH


def _attend(layer: LayerSpec, q_TNH: torch.Tensor, keys: Rows, values: Rows, part: Part) -> torch.Tensor:
    if isinstance(part, DecodePart):
        return _decode_batch(layer, q_TNH, keys, values, part)
    k_KSH, v_KSH = _segment_keys(keys, part.keys), _segment_keys(values, part.keys)
    if q_TNH.shape[0] == 1:
        return _decode_one(layer, q_TNH, k_KSH, v_KSH)
    return _prefill(layer, q_TNH, k_KSH, v_KSH, part)


def _segment_keys(stored: Rows, keys: KeyRange | torch.Tensor) -> torch.Tensor:
    """[K, S, H]: of a tensor a view of consecutive slots, or a copy of scattered ones."""
    if isinstance(keys, KeyRange):
        return stored.narrow(0, keys.first_slot, keys.num_keys).transpose(0, 1)
    return stored.index_select(0, keys).transpose(0, 1)


def _decode_one(layer: LayerSpec, q_1NH: torch.Tensor, k_KSH: torch.Tensor, v_KSH: torch.Tensor) -> torch.Tensor:
    """One query of one sequence: the G heads of a kv head are the rows of one product, and no mask is needed."""
    q_1KGH = q_1NH.reshape(1, k_KSH.shape[0], -1, layer.head_dim)
    out_1KGH = scaled_dot_product_attention(q_1KGH, k_KSH[None], v_KSH[None], scale=layer.scale)
    return out_1KGH.reshape(q_1NH.shape)


def _decode_batch(layer: LayerSpec, q_BNH: torch.Tensor, keys: Rows, values: Rows, part: DecodePart) -> torch.Tensor:
    """As _decode_one, for B sequences of up to S gathered keys in one call."""
    num_sequences, num_kv_heads = q_BNH.shape[0], layer.num_kv_heads
    shape = (num_sequences, -1, num_kv_heads, layer.head_dim)
    k_BKSH, v_BKSH = (x.index_select(0, part.slots).view(shape).transpose(1, 2) for x in (keys, values))
    q_BKGH = q_BNH.reshape(num_sequences, num_kv_heads, -1, layer.head_dim)
    out_BKGH = scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=part.mask_B11S, scale=layer.scale)
    return out_BKGH.reshape(q_BNH.shape)


def _prefill(
    layer: LayerSpec, q_QNH: torch.Tensor, k_KSH: torch.Tensor, v_KSH: torch.Tensor, part: SegmentPart
) -> torch.Tensor:
    """Many queries of one sequence: kv heads are the batch, and the keys are repeated over G by a stride of 0."""
    num_kv_heads, num_keys, head_dim = k_KSH.shape
    q_KGQH = q_QNH.reshape(q_QNH.shape[0], num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, q_KGQH.shape[1], num_keys, head_dim)
    k_KGSH, v_KGSH = k_KSH.unsqueeze(1).expand(shape), v_KSH.unsqueeze(1).expand(shape)
    out_KGQH = scaled_dot_product_attention(
        q_KGQH, k_KGSH, v_KGSH, attn_mask=part.mask_QS, is_causal=part.is_causal, scale=layer.scale
    )
    return out_KGQH.permute(2, 0, 1, 3).reshape(q_QNH.shape)
