"""Attention over paged keys for mixed batches of prefill, decode and verification, and the sum of split key ranges."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from pluglm_attention.triton.softmax import attend
from pluglm_attention.triton.tiles import load_rows, program_rows, store_rows

# M: rows of a program (query tokens x the G query heads of one kv head), H: head dim, padded to a power of two
# P: splits of the keys


@triton.jit(do_not_specialize=["num_segments", "table_stride"])
def unified_kernel(
    q,
    out,
    log_sums,
    keys,
    values,
    k_scales,
    v_scales,
    cu_query,
    num_context,
    block_tables,
    num_segments,
    table_stride,
    scale,
    q_token,
    q_head,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (query tiles, kv heads K, splits P). out: [T, N, P, H]; with log_sums float32 [T, N, P], to be reduced.

    slot_stride, head_stride: of keys and of values. k_scales, v_scales [slots, K]: None for values as they are.
    """
    segment, tokens_M, heads_M, valid_M, positions_M, bounds = program_rows(
        cu_query, num_context, num_segments, GROUP, BLOCK_M, ONE_TILE
    )
    if bounds[0] > bounds[1]:
        return
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    q_MH = load_rows(q, tokens_M * q_token + heads_M * q_head, 1, valid_M, HEAD_DIM, HEAD_PAD)
    where = block_tables + segment.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    if k_scales is not None:
        k_scales += kv_head
        v_scales += kv_head
    storage = (where, keys, values, slot_stride, k_scales, v_scales, num_kv_heads)
    part = (tl.program_id(2), tl.num_programs(2))
    state = attend(q_MH, positions_M, storage, bounds, part, scale, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP)
    rows_M = (tokens_M * (num_kv_heads * GROUP) + heads_M) * tl.num_programs(2) + tl.program_id(2)
    store_rows(out, log_sums, state, rows_M, valid_M, HEAD_DIM)


@triton.jit
def reduce_kernel(
    partial,
    log_sums,
    out,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (T * N). out [T, N, H] from partial [T, N, P, H] float32 and log_sums [T, N, P], P <= SPLITS."""
    row = tl.program_id(0).to(tl.int64)
    splits_P = tl.arange(0, SPLITS)
    sums_P = tl.load(log_sums + row * num_splits + splits_P, mask=splits_P < num_splits, other=float("-inf"))
    top = tl.max(sums_P, 0)
    total = tl.sum(tl.exp2(sums_P - top), 0)
    columns_H = tl.arange(0, HEAD_PAD)
    acc_H = tl.zeros((HEAD_PAD,), tl.float32)
    for first in range(0, num_splits, BLOCK_P):
        part_P = first + tl.arange(0, BLOCK_P)
        known_P = part_P < num_splits
        weights_P = tl.exp2(tl.load(log_sums + row * num_splits + part_P, mask=known_P, other=float("-inf")) - top)
        part_PH = load_rows(partial, row * num_splits + part_P, HEAD_DIM, known_P, HEAD_DIM, HEAD_PAD)
        acc_H += tl.sum(weights_P[:, None] * part_PH, 0)
    tl.store(out + row * HEAD_DIM + columns_H, (acc_H / total).to(out.dtype.element_ty), mask=columns_H < HEAD_DIM)
