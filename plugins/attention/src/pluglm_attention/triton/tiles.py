"""Where things lie: the rows of a program, the stored rows of keys, the results. Runs on the device only."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# M: rows of a program (query tokens x the G query heads of one kv head), B: keys of a tile, H: head dim, padded to a
# power of two

_SEARCH = tl.constexpr(256)


@triton.jit
def find_tile(cu_query, num_segments, tile, BLOCK_Q: tl.constexpr, ONE_TILE: tl.constexpr):
    """(segment, first query of the tile in it): a segment's tiles are numbered from cu_query // BLOCK_Q + segment on.

    That leaves each segment room for all its tiles, so some numbers belong to none: their first query is past the end.
    """
    segment = tile
    first_query = 0
    if not ONE_TILE:
        segment = -1
        for first in range(0, num_segments, _SEARCH):
            segments = first + tl.arange(0, _SEARCH)
            starts = tl.load(cu_query + segments, mask=segments < num_segments, other=0)
            begun = (starts // BLOCK_Q + segments <= tile) & (segments < num_segments)
            segment += tl.sum(begun.to(tl.int32), 0)
        first_query = (tile - segment - tl.load(cu_query + segment) // BLOCK_Q) * BLOCK_Q
    return segment, first_query


@triton.jit
def program_rows(
    cu_query, num_context, num_segments, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ONE_TILE: tl.constexpr
):
    """(segment, tokens_M, heads_M, valid_M, positions_M, (first position, last one, num_keys)) of this program.

    The last tiles come first: they see the most keys, so they should not be started last. first > last: no rows at all.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, first_query = find_tile(cu_query, num_segments, tile, BLOCK_Q, ONE_TILE)
    query_start = tl.load(cu_query + segment)
    num_query = tl.load(cu_query + segment + 1) - query_start
    context = tl.load(num_context + segment)
    rows_M = tl.arange(0, BLOCK_M)
    query_M = first_query + rows_M // GROUP
    heads_M = tl.program_id(1) * GROUP + rows_M % GROUP
    valid_M = (query_M < num_query) & (rows_M < BLOCK_Q * GROUP)
    last = context + tl.minimum(first_query + BLOCK_Q, num_query) - 1
    bounds = (context + first_query, last, context + num_query)
    return segment, (query_start + query_M).to(tl.int64), heads_M, valid_M, context + query_M, bounds


@triton.jit
def key_rows(where, first, num_keys, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Storage rows int64 of the BLOCK_N key positions from `first` on; those from num_keys on are of no use.

    where: the block table, or with BLOCK_SIZE 0 the row of position 0.
    """
    positions_B = first + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE == 0:
        rows_B = where + positions_B
    elif BLOCK_SIZE % BLOCK_N == 0:  # a tile starts at a multiple of its size, so it lies in one block
        rows_B = tl.load(where + first // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + positions_B % BLOCK_SIZE
    else:
        blocks_B = tl.load(where + positions_B // BLOCK_SIZE, mask=positions_B < num_keys, other=0)
        rows_B = blocks_B.to(tl.int64) * BLOCK_SIZE + positions_B % BLOCK_SIZE
    return rows_B


@triton.jit
def load_rows(base, rows, stride, seen, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """[rows, H] in the stored dtype, 0 where not seen and beyond the head dim; seen None is all."""
    columns_H = tl.arange(0, HEAD_PAD)
    pointers = base + rows[:, None] * stride + columns_H[None, :]
    inside = None
    if HEAD_DIM != HEAD_PAD:
        inside = (columns_H < HEAD_DIM)[None, :]
    if seen is not None:
        inside = seen[:, None] if inside is None else inside & seen[:, None]
    return load_some(pointers, inside)


@triton.jit
def load_some(pointers, mask):
    """What the pointers point to, 0 where not in the mask; None is all."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(out, log_sums, state, rows_M, valid_M, HEAD_DIM: tl.constexpr):
    """Writes results, 0 where a row saw no key, and to log_sums, unless None, log2 of what they were divided by."""
    acc_MH, top_M, total_M = state
    total_M = tl.where(total_M > 0.0, total_M, 1.0)
    columns_H = tl.arange(0, acc_MH.shape[1])
    result_MH = (acc_MH / total_M[:, None]).to(out.dtype.element_ty)
    inside_MH = valid_M[:, None] & (columns_H < HEAD_DIM)[None, :]
    tl.store(out + rows_M[:, None] * HEAD_DIM + columns_H[None, :], result_MH, mask=inside_MH)
    if log_sums is not None:
        tl.store(log_sums + rows_M, top_M + tl.log2(total_M), mask=valid_M)
