"""Rows of a matrix by their numbers: the hidden states that logits are asked for."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def gather_rows_kernel(x_pointer, rows_pointer, out_pointer, x_stride, num_columns, BLOCK: tl.constexpr):
    """One program copies BLOCK columns of one row. Row numbers are int64 and not checked."""
    target = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < num_columns
    source = tl.load(rows_pointer + target)
    x = tl.load(x_pointer + source * x_stride + columns, mask=is_real)
    tl.store(out_pointer + target * num_columns + columns, x, mask=is_real)
