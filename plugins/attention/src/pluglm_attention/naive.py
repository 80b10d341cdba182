"""The reference attention: one segment at a time, two matrix products and a float32 softmax between them.

In deterministic runs it computes the same in tiles of one shape; see pluglm_attention.tiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.scores import capped, visible
from pluglm_attention.slots import key_slots
from pluglm_attention.tiled import tiled_attention

# T: tokens of the flat batch, Q: queries of one segment, S: its keys, N: query heads, K: kv heads, G: query heads of a
# kv head (N = K * G), H: head dim


@dataclass(frozen=True, slots=True)
class NaivePlan:
    """slots_T: where new keys and values go; parts: each segment with slots_S of its keys."""

    slots_T: torch.Tensor
    parts: tuple[tuple[Segment, torch.Tensor], ...]


class NaiveAttention(Attention):
    """The reference attention: all that a LayerSpec can ask for, in float32 whatever the run's dtype; slow on purpose.

    Batch invariant in deterministic runs: a row has the same bits in every batch, chunking and block size.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self._attend = tiled_attention if context.deterministic else plain_attention

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    def plan(self, batch: AttentionBatch) -> NaivePlan:
        device = batch.slots_T.device
        parts = tuple((segment, key_slots(segment, batch.block_size, device)) for segment in batch.segments)
        return NaivePlan(batch.slots_T, parts)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: NaivePlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        keys.index_copy_(0, plan.slots_T, k_TKH)
        values.index_copy_(0, plan.slots_T, v_TKH)
        out_TNH = torch.empty_like(q_TNH)
        for segment, slots_S in plan.parts:
            rows = slice(segment.query_start, segment.query_start + segment.num_query)
            k_SKH, v_SKH = keys.index_select(0, slots_S), values.index_select(0, slots_S)
            out_TNH[rows] = self._attend(layer, q_TNH[rows], k_SKH, v_SKH, segment.num_context)
        return out_TNH


def plain_attention(
    layer: LayerSpec, q_QNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, num_context: int
) -> torch.Tensor:
    """out_QNH float32 of queries at positions num_context .. over keys at positions 0 .. S - 1.

    softmax(q k' * scale) v of Vaswani et al. (2017, arXiv:1706.03762), query head n with kv head n // G.
    """
    num_queries, num_heads, head_dim = q_QNH.shape
    num_kv_heads = k_SKH.shape[1]
    q_KGQH = q_QNH.float().reshape(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k_K1SH, v_K1SH = (x.float().transpose(0, 1).unsqueeze(1) for x in (k_SKH, v_SKH))
    scores_KGQS = capped(torch.matmul(q_KGQH, k_K1SH.transpose(2, 3)) * layer.scale, layer.soft_cap)
    queries = torch.arange(num_context, num_context + num_queries, device=q_QNH.device)
    mask_QS = visible(queries, torch.arange(k_SKH.shape[0], device=q_QNH.device), layer.window)
    weights_KGQS = torch.softmax(scores_KGQS.masked_fill(~mask_QS, float("-inf")), dim=-1)
    return torch.matmul(weights_KGQS, v_K1SH).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
