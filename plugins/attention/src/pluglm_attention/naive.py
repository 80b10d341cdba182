"""The reference attention: one segment at a time, two matrix products and a float32 softmax between them.

In deterministic runs it computes the same in tiles of one shape; see pluglm_attention.tiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, KV_FORMATS, BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.bounds import ROUNDED_RESULT
from pluglm_attention.scores import capped, visible
from pluglm_attention.segment_kernel import SegmentKernel, SegmentPlan
from pluglm_attention.tiled import tiled_attention

# T: tokens of the flat batch, Q: queries of one segment, S: its keys, N: query heads, K: kv heads, G: query heads of a
# kv head (N = K * G), H: head dim


class NaiveAttention(Attention):
    """The reference attention: all that a LayerSpec can ask for, in float32 whatever the run's dtype; slow on purpose.

    Batch invariant in deterministic runs: a row has the same bits in every batch, chunking and block size.
    """

    interface_version = 1
    Config = ComponentConfig
    ERROR_BOUNDS: ClassVar[Mapping[str, float]] = ROUNDED_RESULT

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        attend = tiled_attention if context.deterministic else plain_attention
        self._kernel = SegmentKernel(attend, context.kv_format)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT, KV_FORMATS}))

    def plan(self, batch: AttentionBatch) -> SegmentPlan:
        return self._kernel.plan(batch)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: SegmentPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        return self._kernel.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)


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
