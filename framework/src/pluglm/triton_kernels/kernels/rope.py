"""Half-split rotary embedding of all heads of a row, queries and keys side by side. Arithmetic in float32."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Source of the method: RoFormer (arXiv:2104.09864), in the pairing of GPT-NeoX and Llama; norms of query and key heads
# are those of "Query-Key Normalization for Transformers" (arXiv:2010.04245) in the RMS form of Qwen3 and Gemma 3.

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def rope_kernel(
    x_pointer,
    weight_pointer,
    cos_pointer,
    sin_pointer,
    out_pointer,
    x_row_stride,
    x_head_stride,
    num_heads,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program turns BLOCK_HEADS heads of one row, with HAS_NORM each divided by its root mean square before.

    Cosine and sine rows are contiguous, of 2 * HALF values; so are the weights of heads, None without a norm.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    in_half = columns < HALF
    is_real = (heads < num_heads)[:, None] & in_half[None, :]
    cos = tl.load(cos_pointer + row * 2 * HALF + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
    # The first half of the stored sine is negated: the second holds the sine itself.
    sin = tl.load(sin_pointer + row * 2 * HALF + HALF + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
    source = x_pointer + row * x_row_stride + heads[:, None] * x_head_stride + columns[None, :]
    first = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_real, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        inverse = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        weight = weight_pointer + heads[:, None] * 2 * HALF + columns[None, :]
        first = first * inverse * tl.load(weight, mask=is_real, other=0.0).to(tl.float32)
        second = second * inverse * tl.load(weight + HALF, mask=is_real, other=0.0).to(tl.float32)
    target = out_pointer + (row * num_heads + heads[:, None]) * 2 * HALF + columns[None, :]
    tl.store(target, (first * cos - second * sin).to(out_pointer.dtype.element_ty), mask=is_real)
    tl.store(target + HALF, (second * cos + first * sin).to(out_pointer.dtype.element_ty), mask=is_real)
