"""The online softmax of the attention kernels, over a range of keys. Runs on the device only.

The method is FlashAttention-2 (Dao, 2023, arXiv:2307.08691) over the paged keys of PagedAttention (Kwon et al., 2023,
arXiv:2309.06180), with the query heads of a kv head as rows of one product.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from pluglm_attention.triton.tiles import key_rows, load_rows, load_some

# M: rows of a program (query tokens x the G query heads of one kv head), B: keys of a tile, H: head dim, padded to a
# power of two

# Below every score and finite: a row that has seen no key yet then scales by exp2(0), not by exp2(-inf + inf).
LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(q_MH, k_BH, k_scale_B, scale, SOFT_CAP: tl.constexpr):
    """scores_MB float32 for exp2, capped as in Gemma 2 (2024, arXiv:2408.00118, section 2)."""
    scores_MB = tl.dot(q_MH, tl.trans(k_BH.to(q_MH.dtype)), input_precision="ieee")
    factor = scale * LOG2_E
    if SOFT_CAP > 0:
        factor = scale * (2.0 * LOG2_E / SOFT_CAP)
    scores_MB = scores_MB * factor if k_scale_B is None else scores_MB * (k_scale_B * factor)[None, :]
    if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which needs no special case for large x
        scores_MB = SOFT_CAP * LOG2_E - (2.0 * SOFT_CAP * LOG2_E) / (tl.exp2(scores_MB) + 1.0)
    return scores_MB


@triton.jit
def hide(scores_MB, query_M, positions_B, WINDOW: tl.constexpr):
    """-inf where the key comes after the query, or so far before it that the window has passed."""
    distance_MB = query_M[:, None] - positions_B[None, :]
    visible_MB = distance_MB >= 0
    if WINDOW > 0:
        visible_MB = visible_MB & (distance_MB < WINDOW)
    return tl.where(visible_MB, scores_MB, float("-inf"))


@triton.jit
def key_bounds(bounds, index, count, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """(lowest key that a row sees, begin, whole, masked, end) of a part of the keys, the last four being where tiles
    start: from `whole` to `masked` every row sees every key.

    bounds: of the rows, (first position, last one, num_keys). The part: run number `index` of `count` runs of tiles.
    """
    first_query, last_query, _ = bounds
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_query - WINDOW + 1, 0)
    begin = lowest // BLOCK_N * BLOCK_N
    run = tl.cdiv(tl.cdiv(last_query + 1 - begin, BLOCK_N), count) * BLOCK_N
    begin += index * run
    end = tl.minimum(begin + run, last_query + 1)
    whole = begin
    if WINDOW > 0:
        whole = tl.cdiv(tl.maximum(last_query - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        whole = tl.maximum(tl.minimum(whole, end), begin)
    masked = tl.maximum(tl.minimum((first_query + 1) // BLOCK_N * BLOCK_N, end), whole)
    return lowest, begin, whole, masked, end


@triton.jit
def attend_range(
    state,
    given,
    first_key,
    last_key,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """state after the key tiles first_key .. last_key; not MASKED: every row sees every key of them.

    state: (acc_MH, top_M, total_M) float32. given: (q_MH, positions of its rows, storage, lowest key position that any
    row sees, num_keys, scale). storage: (block table or first row, keys, values, stride of their rows, their scales or
    None, stride of those).
    """
    acc_MH, top_M, total_M = state
    q_MH, query_M, storage, lowest, num_keys, scale = given
    where, keys, values, stride, k_scales, v_scales, scale_stride = storage
    # There are few masked tiles, and pipelining them as well would double the code and its registers.
    STAGES: tl.constexpr = 1 if MASKED else None
    for first in tl.range(first_key, last_key, BLOCK_N, num_stages=STAGES):
        rows_B = key_rows(where, first, num_keys, BLOCK_SIZE, BLOCK_N)
        positions_B = first + tl.arange(0, BLOCK_N)
        seen_B = None
        k_scale_B = None
        if MASKED:
            seen_B = (positions_B >= lowest) & (positions_B < num_keys)
        if k_scales is not None:
            k_scale_B = load_some(k_scales + rows_B * scale_stride, seen_B)
        k_BH = load_rows(keys, rows_B, stride, seen_B, HEAD_DIM, q_MH.shape[1])
        scores_MB = scores_of(q_MH, k_BH, k_scale_B, scale, SOFT_CAP)
        if MASKED:
            scores_MB = hide(scores_MB, query_M, positions_B, WINDOW)
        new_top_M = tl.maximum(top_M, tl.max(scores_MB, 1))
        weights_MB = tl.exp2(scores_MB - new_top_M[:, None])
        shrink_M = tl.exp2(top_M - new_top_M)
        total_M = total_M * shrink_M + tl.sum(weights_MB, 1)
        top_M = new_top_M
        v_BH = load_rows(values, rows_B, stride, seen_B, HEAD_DIM, q_MH.shape[1])
        if v_scales is not None:
            v_BH = v_BH.to(tl.float32) * load_some(v_scales + rows_B * scale_stride, seen_B)[:, None]
        weights_MB = weights_MB.to(q_MH.dtype)
        acc_MH = tl.dot(weights_MB, v_BH.to(q_MH.dtype), acc_MH * shrink_M[:, None], input_precision="ieee")
    return acc_MH, top_M, total_M


@triton.jit
def attend(
    q_MH,
    query_M,
    storage,
    bounds,
    part,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """(acc_MH, top_M, total_M) of the rows over a part of the keys. storage: as in attend_range; bounds: as in
    key_bounds; part: its index and count."""
    lowest, begin, whole, masked, end = key_bounds(bounds, part[0], part[1], BLOCK_N, WINDOW)
    M: tl.constexpr = q_MH.shape[0]
    state = (tl.zeros(q_MH.shape, tl.float32), tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32))
    given = (q_MH, query_M, storage, lowest, bounds[2], scale)
    if WINDOW > 0:
        state = attend_range(state, given, begin, whole, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, True)
    state = attend_range(state, given, whole, masked, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, False)
    return attend_range(state, given, masked, end, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, True)
