"""RMS normalisation of rows, with the residual addition before it. One program a row, arithmetic in float32."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Source of the method: Liger-Kernel's fused_add_rms_norm (arXiv:2410.10989).

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def rms_norm_kernel(
    x_pointer,
    residual_pointer,
    weight_pointer,
    out_pointer,
    sum_pointer,
    x_stride,
    residual_stride,
    num_features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = y / rms(y) * (offset + weight), y = x or, stored in `sum`, x + residual rounded to x's type."""
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    is_real = features < num_features
    x = tl.load(x_pointer + row * x_stride + features, mask=is_real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_pointer + row * residual_stride + features, mask=is_real, other=0.0)
        # The later layers read the rounded sum, so the norm is of that.
        rounded = (x + residual.to(tl.float32)).to(sum_pointer.dtype.element_ty)
        tl.store(sum_pointer + row * num_features + features, rounded, mask=is_real)
        x = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / num_features + eps)
    weight = tl.load(weight_pointer + features, mask=is_real, other=0.0).to(tl.float32)
    out = x * inverse * (offset + weight)
    tl.store(out_pointer + row * num_features + features, out.to(out_pointer.dtype.element_ty), mask=is_real)
