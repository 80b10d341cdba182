"""The plain attention with plans for graphs, for the tests of backends: block tables and lengths are tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.tiny_model import LoopAttention

# B: rows of a graph, M: blocks of a table, S: M * block size keys, N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True)
class TablePlan:
    """All int64. slots_B: where new tokens go; tables_BM: blocks, anything behind a row's own; num_keys_B."""

    slots_B: torch.Tensor
    tables_BM: torch.Tensor
    num_keys_B: torch.Tensor


class TableAttention(LoopAttention):
    """A GraphAttention that is LoopAttention in eager steps. On the CPU, where nothing has to be staged."""

    def static_plan(self, batch: AttentionBatch, max_blocks: int) -> TablePlan:
        num_rows = len(batch.segments)
        tables_BM = torch.zeros(num_rows, max_blocks, dtype=torch.int64)
        plan = TablePlan(batch.slots_T, tables_BM, torch.zeros(num_rows, dtype=torch.int64))
        self.refill(plan, batch)
        return plan

    def refill(self, plan: TablePlan, batch: AttentionBatch) -> None:
        for row, segment in enumerate(batch.segments):
            table = torch.tensor(segment.block_table)
            plan.tables_BM[row, : len(table)] = table
        plan.num_keys_B.copy_(torch.tensor([segment.num_keys for segment in batch.segments]))

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor:
        if not isinstance(plan, TablePlan):
            return super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
        keys, values, size = kv.keys(layer.index), kv.values(layer.index), kv.layout.block_size
        keys.index_copy_(0, plan.slots_B, k_TKH)
        values.index_copy_(0, plan.slots_B, v_TKH)
        slots_BS = (plan.tables_BM[:, :, None] * size + torch.arange(size)).flatten(1)
        hidden_BS = torch.arange(slots_BS.shape[1]) >= plan.num_keys_B[:, None]
        group = layer.num_heads // layer.num_kv_heads
        k_BSNH, v_BSNH = (
            one[slots_BS].masked_fill(hidden_BS[:, :, None, None], 0.0).repeat_interleave(group, 2)
            for one in (keys, values)
        )
        scores_BSN = (k_BSNH * q_TNH[:, None]).sum(-1) * layer.scale
        weights_BSN = scores_BSN.masked_fill(hidden_BS[:, :, None], -torch.inf).softmax(1)
        return (weights_BSN[..., None] * v_BSNH).sum(1)
