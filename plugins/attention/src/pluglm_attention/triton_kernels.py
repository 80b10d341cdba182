"""The Triton kernels as a plugin runs them. Only building one imports triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat, PartedStore, SymmetricCodes
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.slots import first_slot_if_consecutive, first_visible_key, key_slots
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, LaunchTable, check_storage
from pluglm_attention.triton.plan import FlashPlan, KVScales, TritonPlan, plan_flash, plan_paged

# T: tokens of the flat batch, S: keys, N: query heads, K: kv heads, H: head dim

# What the kernels quantise to while they write, and decode while they read.
CODES = (
    SymmetricCodes(value_dtype=torch.int8, limit=127.0, least_scale=1e-12),
    SymmetricCodes(value_dtype=torch.float8_e4m3fn, limit=448.0, least_scale=1e-12),
)


def codes_of(kv_format: KVFormat | None) -> SymmetricCodes | None:
    """Of a format that `why_not_encoded` accepts."""
    return None if kv_format is None else kv_format.symmetric()


def why_not_encoded(kv_format: KVFormat | None, device: torch.device) -> str | None:
    """Why the kernels cannot store KV in this format on a device, or None."""
    if kv_format is None:
        return None
    codes = kv_format.symmetric()
    if codes not in CODES:
        return "it stores symmetric int8 and e4m3 codes, and the run's KV format has other ones"
    try:
        check_storage(codes.value_dtype, device)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """slots_T: where new keys and values go. max_blocks: of a plan for graphs, the widest table it takes."""

    slots_T: torch.Tensor
    on_device: TritonPlan
    max_blocks: int | None = None


class TritonPaged:
    """Keys through block tables, in place. Its plans are a GraphAttention's. codes: of a KV format, one of CODES."""

    def __init__(self, codes: SymmetricCodes | None = None, table: LaunchTable = DEFAULT_TABLE) -> None:
        from pluglm_attention.triton.launch import launch_unified
        from pluglm_attention.triton.launch_scatter import launch_scatter

        self._attend, self._store, self._codes = partial(launch_unified, table=table), launch_scatter, codes

    def plan(self, batch: AttentionBatch) -> PagedPlan:
        return PagedPlan(batch.slots_T, plan_paged(batch.segments, batch.block_size, batch.slots_T.device))

    def static_plan(self, batch: AttentionBatch, max_blocks: int) -> PagedPlan:
        return PagedPlan(batch.slots_T, _sized_plan(batch, max_blocks), max_blocks)

    def refill(self, plan: PagedPlan, batch: AttentionBatch) -> None:
        """ValueError for a batch of another size, and for a plan that is not from static_plan."""
        if plan.max_blocks is None:
            raise ValueError("only a plan from static_plan can be refilled")
        plan.on_device.update(_sized_plan(batch, plan.max_blocks))

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: PagedPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values, scales = self._stored(layer, kv)
        self._store(k_TKH, v_TKH, plan.slots_T, keys, values, scales)
        return self._attend(layer, q_TNH, keys, values, plan.on_device, scales=scales)

    def _stored(self, layer: LayerSpec, kv: KVStore) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
        """Keys and values as the kernels take them, and their scales."""
        if self._codes is None:
            return kv.keys(layer.index), kv.values(layer.index), None
        keys, values, k_scales_SK1, v_scales_SK1 = cast(PartedStore, kv).parts(layer.index)
        dtype = self._codes.value_dtype
        return keys.view(dtype), values.view(dtype), KVScales(k_scales_SK1.squeeze(2), v_scales_SK1.squeeze(2))


def _sized_plan(batch: AttentionBatch, max_blocks: int) -> TritonPlan:
    device = batch.slots_T.device
    num_segments = len(batch.segments)
    return plan_paged(batch.segments, batch.block_size, device, num_segments=num_segments, max_blocks=max_blocks)


@dataclass(frozen=True, slots=True)
class Rows:
    """on_device: whose rows are those of the storage, or with slots_S of what is gathered from there."""

    on_device: FlashPlan
    slots_S: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """rows: by window, made when a layer first asks for them."""

    batch: AttentionBatch
    rows: dict[int | None, Rows] = field(default_factory=dict)


class TritonFlash:
    """Keys in consecutive rows: in place where every sequence's blocks lie side by side, else gathered first."""

    def __init__(self, table: LaunchTable = DEFAULT_TABLE) -> None:
        from pluglm_attention.triton.launch import launch_flash
        from pluglm_attention.triton.launch_scatter import launch_scatter

        self._attend, self._store = partial(launch_flash, table=table), launch_scatter

    def plan(self, batch: AttentionBatch) -> RowsPlan:
        return RowsPlan(batch)

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: RowsPlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        self._store(k_TKH, v_TKH, plan.batch.slots_T, keys, values)
        if layer.window not in plan.rows:
            plan.rows[layer.window] = find_rows(plan.batch, layer.window)
        rows = plan.rows[layer.window]
        if rows.slots_S is not None:
            keys, values = (stored.index_select(0, rows.slots_S) for stored in (keys, values))
        return self._attend(layer, q_TNH, keys, values, rows.on_device)


def find_rows(batch: AttentionBatch, window: int | None) -> Rows:
    """Rows of position 0 may be negative or another sequence's where a window hides it: they are counted from only."""
    segments = [segment for segment in batch.segments if segment.num_query > 0]
    block_size, device = batch.block_size, batch.slots_T.device
    firsts = [first_visible_key(segment.num_context, window) for segment in segments]
    pairs = list(zip(segments, firsts, strict=True))
    slots = [first_slot_if_consecutive(segment, block_size, first) for segment, first in pairs]
    starts = [slot - first for slot, first in zip(slots, firsts, strict=True) if slot is not None]
    if len(starts) == len(segments):
        return Rows(plan_flash(segments, starts, device), None)
    parts = [key_slots(segment, block_size, device, first) for segment, first in pairs]
    row, starts = 0, []
    for part, first in zip(parts, firsts, strict=True):
        starts.append(row - first)
        row += len(part)
    return Rows(plan_flash(segments, starts, device), torch.cat(parts))
