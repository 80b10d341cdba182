"""The kernels in plain torch, for any device: tiles of one sequence each, and pieces of many sequences for decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.key_pieces import MOST_QUERIES, PieceBatch, attend_pieces, piece_batches
from pluglm_attention.query_tiles import QueryTile, attend_tile, query_tiles
from pluglm_attention.rows import write_rows

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True)
class TorchWork:
    """What layers with one window compute: batches of pieces, then tiles."""

    pieces: list[PieceBatch]
    tiles: list[QueryTile]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """work: by window, made when a layer first asks for it."""

    batch: AttentionBatch
    work: dict[int | None, TorchWork] = field(default_factory=dict)


class TorchKernel:
    """Segments of up to most_in_pieces queries are computed together, in pieces of their keys; others in tiles."""

    def __init__(self, most_in_pieces: int, kv_format: KVFormat | None) -> None:
        self._most_in_pieces, self._kv_format = most_in_pieces, kv_format

    @classmethod
    def flash(cls, kv_format: KVFormat | None = None) -> TorchKernel:
        """Everything in tiles."""
        return cls(0, kv_format)

    @classmethod
    def paged(cls, kv_format: KVFormat | None = None) -> TorchKernel:
        return cls(MOST_QUERIES, kv_format)

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        return TorchPlan(batch)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: TorchPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = write_rows(layer, k_TKH, v_TKH, plan.batch.slots_T, kv, self._kv_format)
        if layer.window not in plan.work:
            plan.work[layer.window] = self._work(plan.batch, layer.window)
        out_TNH = torch.empty_like(q_TNH)
        for pieces in plan.work[layer.window].pieces:
            attend_pieces(layer, q_TNH, keys, values, pieces, out_TNH)
        for tile in plan.work[layer.window].tiles:
            out_TNH[tile.rows] = attend_tile(layer, q_TNH[tile.rows], keys, values, tile)
        return out_TNH

    def _work(self, batch: AttentionBatch, window: int | None) -> TorchWork:
        device, block_size = batch.slots_T.device, batch.block_size
        few: list[Segment] = []
        tiles: list[QueryTile] = []
        for segment in batch.segments:
            if 0 < segment.num_query <= self._most_in_pieces:
                few.append(segment)
            else:
                tiles += query_tiles(segment, block_size, window, device)
        return TorchWork(piece_batches(few, block_size, window, device), tiles)
