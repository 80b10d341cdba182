"""Every kernel of the framework in the forms it is launched in, for compiling ahead of time. Imports triton."""

from __future__ import annotations

from collections.abc import Iterator

from pluglm.triton_kernels.aot import KernelCase
from pluglm.triton_kernels.gated import column_blocks
from pluglm.triton_kernels.launching import MOST_FEATURES
from pluglm.triton_kernels.rms_norm import norm_blocks
from pluglm.triton_kernels.rope import rope_blocks

# The hidden size of a 135M model and the most that one program holds; heads with their dimensions, small and large.
HIDDEN_SIZES = (576, MOST_FEATURES)
HEADS = ((12, 64), (72, 128))
MLP_WIDTH = 14336


def elementwise_cases() -> Iterator[KernelCase]:
    """bfloat16 in every form, the other types where they cost most."""
    yield from (norm_case("*bf16", hidden_size, has_residual=True) for hidden_size in HIDDEN_SIZES)
    yield norm_case("*bf16", HIDDEN_SIZES[0], has_residual=False)
    yield from (rope_case("*bf16", num_heads, head_dim) for num_heads, head_dim in HEADS)
    yield gated_case("*bf16", is_gelu=False)
    yield gather_case("*bf16")
    yield gated_case("*fp16", is_gelu=True)
    yield norm_case("*fp32", HIDDEN_SIZES[-1], has_residual=True)
    yield rope_case("*fp32", *HEADS[-1])
    yield gated_case("*fp32", is_gelu=True)


def norm_case(dtype: str, hidden_size: int, has_residual: bool) -> KernelCase:
    from pluglm.triton_kernels.kernels.rms_norm import rms_norm_kernel

    block, num_warps = norm_blocks(hidden_size)
    extra = {"residual_pointer": dtype, "sum_pointer": dtype, "residual_stride": "i32"} if has_residual else {}
    absent = {} if has_residual else {"residual_pointer": None, "sum_pointer": None, "residual_stride": 0}
    pointers = {f"{name}_pointer": dtype for name in ("x", "weight", "out")}
    integers = {"x_stride": "i32", "num_features": "i32"}
    return KernelCase(
        name=f"{'add_' if has_residual else ''}rms_norm {dtype[1:]} D={hidden_size}",
        fn=rms_norm_kernel,
        signature={**pointers, **integers, **extra, "eps": "fp32", "offset": "fp32"},
        constexprs={**absent, "HAS_RESIDUAL": has_residual, "BLOCK": block},
        divisible=frozenset((*pointers, *integers, *extra)),
        num_warps=num_warps,
    )


def rope_case(dtype: str, num_heads: int, head_dim: int) -> KernelCase:
    from pluglm.triton_kernels.kernels.rope import rope_kernel

    block_heads, block_half, num_warps = rope_blocks(num_heads, head_dim)
    pointers = {f"{name}_pointer": dtype for name in ("x", "cos", "sin", "out")}
    strides = {"x_row_stride": "i32", "x_head_stride": "i32"}
    return KernelCase(
        name=f"rope {dtype[1:]} C={num_heads} H={head_dim}",
        fn=rope_kernel,
        signature={**pointers, **strides, "num_heads": "i32"},
        constexprs={"HALF": head_dim // 2, "BLOCK_HEADS": block_heads, "BLOCK_HALF": block_half},
        divisible=frozenset((*pointers, *strides)),
        num_warps=num_warps,
    )


def gated_case(dtype: str, is_gelu: bool) -> KernelCase:
    from pluglm.triton_kernels.kernels.gated import gated_kernel

    block, num_warps = column_blocks(MLP_WIDTH)
    arguments = {"gate_up_pointer": dtype, "out_pointer": dtype, "row_stride": "i32", "num_columns": "i32"}
    return KernelCase(
        name=f"{'geglu' if is_gelu else 'swiglu'} {dtype[1:]}",
        fn=gated_kernel,
        signature=arguments,
        constexprs={"IS_GELU": is_gelu, "BLOCK": block},
        divisible=frozenset(arguments),
        num_warps=num_warps,
    )


def gather_case(dtype: str) -> KernelCase:
    from pluglm.triton_kernels.kernels.gather import gather_rows_kernel

    block, num_warps = column_blocks(HIDDEN_SIZES[1])
    arguments = {"x_pointer": dtype, "rows_pointer": "*i64", "out_pointer": dtype}
    integers = {"x_stride": "i32", "num_columns": "i32"}
    return KernelCase(
        name=f"gather_rows {dtype[1:]}",
        fn=gather_rows_kernel,
        signature={**arguments, **integers},
        constexprs={"BLOCK": block},
        divisible=frozenset((*arguments, *integers)),
        num_warps=num_warps,
    )
