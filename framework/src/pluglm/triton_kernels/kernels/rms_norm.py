"""RMS normalisation of rows, with the residual addition before it. One program a row, arithmetic in float32."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Source of the method: Liger-Kernel's fused_add_rms_norm (arXiv:2410.10989); norms on both sides of an addition are
# those of Gemma 2 (arXiv:2408.00118).

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def _normed(x, weight_pointer, features, is_real, num_features, eps, offset):
    """x / rms(x) * (offset + weight); x is 0 behind the row's end."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / num_features + eps)
    weight = tl.load(weight_pointer + features, mask=is_real, other=0.0).to(tl.float32)
    return x * inverse * (offset + weight)


@triton.jit
def rms_norm_kernel(
    x_pointer,
    residual_pointer,
    x_weight_pointer,
    weight_pointer,
    out_pointer,
    sum_pointer,
    x_stride,
    residual_stride,
    num_features,
    eps,
    offset,
    NORMS_X: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORMS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x, or normed with x_weight; sum = y + residual, rounded to its type; out = the norm of sum, or of y without.

    Without NORMS_SUM there is no out. Pointers of what is not there are None.
    """
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    is_real = features < num_features
    x = tl.load(x_pointer + row * x_stride + features, mask=is_real, other=0.0).to(tl.float32)
    if NORMS_X:
        x = _normed(x, x_weight_pointer, features, is_real, num_features, eps, offset)
    if HAS_RESIDUAL:
        residual = tl.load(residual_pointer + row * residual_stride + features, mask=is_real, other=0.0)
        # The later layers read the rounded sum, so the norm is of that.
        rounded = (x + residual.to(tl.float32)).to(sum_pointer.dtype.element_ty)
        tl.store(sum_pointer + row * num_features + features, rounded, mask=is_real)
        x = rounded.to(tl.float32)
    if NORMS_SUM:
        out = _normed(x, weight_pointer, features, is_real, num_features, eps, offset)
        tl.store(out_pointer + row * num_features + features, out.to(out_pointer.dtype.element_ty), mask=is_real)
