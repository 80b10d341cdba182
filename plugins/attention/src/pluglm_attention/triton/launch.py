"""Starts the attention kernels. Importing it imports triton: ask `unavailable()` first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.triton.checks import check_attention, check_storage_of, on_device
from pluglm_attention.triton.flash import flash_kernel
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, Kernel, LaunchConfig, LaunchTable, choose_config
from pluglm_attention.triton.plan import FlashPlan, KVScales, TritonPlan
from pluglm_attention.triton.splits import choose_splits
from pluglm_attention.triton.unified import reduce_kernel, unified_kernel

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim, P: splits of the keys

_REDUCE_SPLITS = 16  # splits that the sum takes at a time


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a launch is made of. block_q: query tokens of a tile."""

    group: int
    head_pad: int
    config: LaunchConfig

    @property
    def block_q(self) -> int:
        return self.config.block_m // self.group


def launch_unified(
    layer: LayerSpec,
    q_TNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: TritonPlan,
    *,
    scales: KVScales | None = None,
    num_splits: int | None = None,
    table: LaunchTable = DEFAULT_TABLE,
) -> torch.Tensor:
    """out_TNH, contiguous, in q's dtype: the attention of a batch over keys and values [slots, K, H] that are stored.

    Rows from plan.num_tokens on are left as they come. scales: the storage is int8 or e4m3. num_splits: of the keys
    where each segment's queries are one tile; None asks `choose_splits`. ValueError for what the kernel cannot run.
    """
    check_attention(layer, q_TNH, keys, values, plan.num_tokens)
    check_storage_of(keys, values, scales, q_TNH.dtype)
    shape = _paged_shape(layer, q_TNH, plan, "prefill" if scales is None else "quantised", table)
    one_tile = plan.max_query <= shape.block_q
    tiles = plan.num_segments if one_tile else plan.num_tokens // shape.block_q + plan.num_segments
    splits = _splits(layer, q_TNH.device, plan, tiles, num_splits) if one_tile else 1
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if plan.num_tokens == 0:
        return out_TNH
    target, log_sums = out_TNH, None
    if splits > 1:
        num_tokens, num_heads, head_dim = q_TNH.shape
        target = q_TNH.new_empty((num_tokens, num_heads, splits, head_dim), dtype=torch.float32)
        log_sums = q_TNH.new_empty((num_tokens, num_heads, splits), dtype=torch.float32)
    with on_device(q_TNH):
        unified_kernel[tiles, layer.num_kv_heads, splits](
            q_TNH,
            target,
            log_sums,
            keys,
            values,
            *((None, None) if scales is None else scales),
            plan.cu_query,
            plan.num_context,
            plan.block_tables,
            plan.num_segments,
            plan.block_tables.stride(0),
            layer.scale,
            *_strides(q_TNH, keys),
            BLOCK_SIZE=plan.block_size,
            ONE_TILE=one_tile,
            **_constants(layer, shape),
        )
        if log_sums is not None:
            _reduce(target, log_sums, out_TNH, plan.num_tokens)
    return out_TNH


def launch_flash(
    layer: LayerSpec,
    q_TNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    plan: FlashPlan,
    *,
    table: LaunchTable = DEFAULT_TABLE,
) -> torch.Tensor:
    """out_TNH, contiguous, in q's dtype. Each segment's keys, those before its queries too, are rows side by side in
    k and v: of the KV storage, or gathered from it. Rows from plan.num_tokens on are left as they come."""
    check_attention(layer, q_TNH, k_SKH, v_SKH, plan.num_tokens)
    check_storage_of(k_SKH, v_SKH, None, q_TNH.dtype)
    shape = _shape(layer, q_TNH, "flash", table)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    num_segments = plan.num_context.shape[0]
    if plan.num_tokens == 0:
        return out_TNH
    with on_device(q_TNH):
        flash_kernel[plan.num_tokens // shape.block_q + num_segments, layer.num_kv_heads](
            q_TNH,
            out_TNH,
            k_SKH,
            v_SKH,
            plan.cu_query,
            plan.num_context,
            plan.first_rows,
            num_segments,
            layer.scale,
            *_strides(q_TNH, k_SKH),
            **_constants(layer, shape),
        )
    return out_TNH


def _reduce(partial: torch.Tensor, log_sums: torch.Tensor, out_TNH: torch.Tensor, num_tokens: int) -> None:
    head_dim = out_TNH.shape[2]
    splits = log_sums.shape[2]
    reduce_kernel[(num_tokens * out_TNH.shape[1],)](
        partial,
        log_sums,
        out_TNH,
        splits,
        HEAD_DIM=head_dim,
        HEAD_PAD=_power_of_two(head_dim),
        SPLITS=_power_of_two(splits),
        BLOCK_P=_REDUCE_SPLITS,
        num_warps=4,
    )


def _paged_shape(
    layer: LayerSpec, q_TNH: torch.Tensor, plan: TritonPlan, otherwise: Kernel, table: LaunchTable
) -> _Shape:
    """The decode tile if it holds all queries of any segment, with their heads."""
    decode = _shape(layer, q_TNH, "decode", table)
    return decode if plan.max_query <= decode.block_q else _shape(layer, q_TNH, otherwise, table)


def _shape(layer: LayerSpec, q_TNH: torch.Tensor, kernel: Kernel, table: LaunchTable) -> _Shape:
    """A tile has at least the rows of one token: more query heads of a kv head make it larger."""
    group = layer.num_heads // layer.num_kv_heads
    kernel = "float32" if q_TNH.dtype == torch.float32 else kernel
    config = choose_config(table, kernel, q_TNH.device, layer.head_dim)
    if config.block_m < group:
        config = LaunchConfig(_power_of_two(group), config.block_n, config.num_warps, config.num_stages)
    return _Shape(group, _power_of_two(layer.head_dim), config)


def _splits(layer: LayerSpec, device: torch.device, plan: TritonPlan, tiles: int, wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return 1
    seen = plan.max_keys if layer.window is None else min(plan.max_keys, layer.window + plan.max_query)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_splits(tiles * layer.num_kv_heads, seen, processors)


def _constants(layer: LayerSpec, shape: _Shape) -> dict[str, int | float]:
    return {
        "GROUP": shape.group,
        "HEAD_DIM": layer.head_dim,
        "HEAD_PAD": shape.head_pad,
        "WINDOW": layer.window or 0,
        "SOFT_CAP": layer.soft_cap or 0.0,
        "BLOCK_M": shape.config.block_m,
        "BLOCK_N": shape.config.block_n,
        "num_warps": shape.config.num_warps,
        "num_stages": shape.config.num_stages,
    }


def _strides(q_TNH: torch.Tensor, keys: torch.Tensor) -> tuple[int, ...]:
    return (*q_TNH.stride()[:2], *keys.stride()[:2])


def _power_of_two(size: int) -> int:
    """The next one, 16 at least: the smallest side of a product."""
    return max(16, 1 << (size - 1).bit_length())
