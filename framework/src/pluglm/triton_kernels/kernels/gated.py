"""The gated activations of feed-forward layers: act(gate) * up. Arithmetic in float32, rounded once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Source of the method: GLU variants (arXiv:2002.05202); both forms of GELU are those of arXiv:1606.08415.

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def gated_kernel(gate_up_pointer, out_pointer, row_stride, num_columns, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """One program makes BLOCK columns of one row; a row holds num_columns of gate, then as many of up.

    FORM: silu, gelu (with the error function), gelu_tanh or relu.
    """
    tl.static_assert((FORM == "silu") or (FORM == "gelu") or (FORM == "gelu_tanh") or (FORM == "relu"))
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < num_columns
    source = gate_up_pointer + row * row_stride + columns
    gate = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(source + num_columns, mask=is_real, other=0.0).to(tl.float32)
    if FORM == "relu":
        active = tl.where(gate < 0.0, 0.0, gate)  # not a maximum, which would lose NaN
    elif FORM == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif FORM == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is the sigmoid of 2u; 1.5957... = 2 sqrt(2/pi).
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    tl.store(out_pointer + row * num_columns + columns, (active * up).to(out_pointer.dtype.element_ty), mask=is_real)
