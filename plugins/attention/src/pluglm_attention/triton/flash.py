"""Attention over consecutive keys: variable lengths, causal, queries behind a prefix that is stored already."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from pluglm_attention.triton.softmax import attend
from pluglm_attention.triton.tiles import load_rows, program_rows, store_rows

# M: rows of a program (query tokens x the G query heads of one kv head), H: head dim, padded to a power of two


@triton.jit(do_not_specialize=["num_segments"])
def flash_kernel(
    q,
    out,
    keys,
    values,
    cu_query,
    num_context,
    first_rows,
    num_segments,
    scale,
    q_token,
    q_head,
    row_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (query tiles, kv heads). out: [T, N, H]. first_rows int32: the row of keys and values of each position 0."""
    segment, tokens_M, heads_M, valid_M, positions_M, bounds = program_rows(
        cu_query, num_context, num_segments, GROUP, BLOCK_M, False
    )
    if bounds[0] > bounds[1]:
        return
    q_MH = load_rows(q, tokens_M * q_token + heads_M * q_head, 1, valid_M, HEAD_DIM, HEAD_PAD)
    where = tl.load(first_rows + segment).to(tl.int64)
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride
    storage = (where, keys, values, row_stride, None, None, 0)
    state = attend(q_MH, positions_M, storage, bounds, (0, 1), scale, HEAD_DIM, 0, BLOCK_N, WINDOW, SOFT_CAP)
    store_rows(out, None, state, tokens_M * (tl.num_programs(1) * GROUP) + heads_M, valid_M, HEAD_DIM)
