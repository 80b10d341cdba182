"""One segment at a time over all of its keys, gathered: what the reference arithmetics have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.rows import write_rows
from pluglm_attention.slots import key_slots

# T: tokens of the flat batch, Q: queries of one segment, S: its keys, N: query heads, K: kv heads, H: head dim

# layer, q_QNH, k_SKH, v_SKH, num_context -> out_QNH float32
SegmentFunction = Callable[[LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """slots_T: where new keys and values go; parts: each segment that has queries, with slots_S of its keys."""

    slots_T: torch.Tensor
    parts: tuple[tuple[Segment, torch.Tensor], ...]


class SegmentKernel:
    """attend: computes one segment, whose keys and values are decoded where the run has a KV format."""

    def __init__(self, attend: SegmentFunction, kv_format: KVFormat | None) -> None:
        self._attend, self._kv_format = attend, kv_format

    def plan(self, batch: AttentionBatch) -> SegmentPlan:
        device = batch.slots_T.device
        segments = [segment for segment in batch.segments if segment.num_query > 0]
        parts = tuple((segment, key_slots(segment, batch.block_size, device)) for segment in segments)
        return SegmentPlan(batch.slots_T, parts)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: SegmentPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = write_rows(layer, k_TKH, v_TKH, plan.slots_T, kv, self._kv_format)
        out_TNH = torch.empty_like(q_TNH)
        for segment, slots_S in plan.parts:
            rows = slice(segment.query_start, segment.query_start + segment.num_query)
            k_SKH, v_SKH = keys.index_select(0, slots_S), values.index_select(0, slots_S)
            out_TNH[rows] = self._attend(layer, q_TNH[rows], k_SKH, v_SKH, segment.num_context)
        return out_TNH
