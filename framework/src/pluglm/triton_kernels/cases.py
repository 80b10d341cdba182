"""Every kernel of the framework in the forms it is launched in, for compiling ahead of time. Imports triton."""

from __future__ import annotations

from collections.abc import Iterator

from pluglm.triton_kernels.aot import KernelCase
from pluglm.triton_kernels.gated import GATED_ACTIVATIONS, column_blocks
from pluglm.triton_kernels.launching import MOST_FEATURES
from pluglm.triton_kernels.rms_norm import norm_blocks
from pluglm.triton_kernels.rope import rope_blocks

# The hidden size of a 135M model and the most that one program holds; heads with their dimensions, small and large.
HIDDEN_SIZES = (576, MOST_FEATURES)
HEADS = ((12, 64), (72, 128))
MLP_WIDTH = 14336

# NORMS_X, HAS_RESIDUAL and NORMS_SUM: what stands before the products of a layer, and at its end.
NORM_FORMS = {
    "norm": (False, False, True),
    "add_norm": (False, True, True),
    "norm_add_norm": (True, True, True),
    "add": (False, True, False),
    "norm_add": (True, True, False),
}


def elementwise_cases() -> Iterator[KernelCase]:
    """bfloat16 in every form, the other types where they cost most. Norm weights are float32, as a layer has them."""
    yield from (norm_case(form, "*bf16", HIDDEN_SIZES[0]) for form in NORM_FORMS)
    yield norm_case("norm_add_norm", "*bf16", HIDDEN_SIZES[1])
    yield rope_case("*bf16", *HEADS[0], has_norm=False)
    yield from (rope_case("*bf16", *HEADS[1], has_norm) for has_norm in (False, True))
    yield from (gated_case("*bf16", form) for form in sorted(set(GATED_ACTIVATIONS.values())))
    yield gather_case("*bf16")
    yield gated_case("*fp16", "gelu")
    yield norm_case("norm_add_norm", "*fp32", HIDDEN_SIZES[-1])
    yield rope_case("*fp32", *HEADS[-1], has_norm=True)
    yield gated_case("*fp32", "gelu")


def norm_case(form: str, dtype: str, hidden_size: int) -> KernelCase:
    """form: one of NORM_FORMS."""
    from pluglm.triton_kernels.kernels.rms_norm import rms_norm_kernel

    norms_x, has_residual, norms_sum = flags = NORM_FORMS[form]
    block, num_warps = norm_blocks(hidden_size)
    types: dict[str, str | None] = {
        "x_pointer": dtype,
        "residual_pointer": dtype if has_residual else None,
        "x_weight_pointer": "*fp32" if norms_x else None,
        "weight_pointer": "*fp32" if norms_sum else None,
        "out_pointer": dtype if norms_sum else None,
        "sum_pointer": dtype if has_residual else None,
        "x_stride": "i32",
        "residual_stride": "i32",
        "num_features": "i32",
    }
    present = {name: kind for name, kind in types.items() if kind is not None}
    return KernelCase(
        name=f"{form} {dtype[1:]} D={hidden_size}",
        fn=rms_norm_kernel,
        signature={**present, "eps": "fp32", "offset": "fp32"},
        constexprs={
            **dict.fromkeys(types.keys() - present.keys()),
            **dict(zip(("NORMS_X", "HAS_RESIDUAL", "NORMS_SUM"), flags, strict=True)),
            "BLOCK": block,
        },
        divisible=frozenset(present),
        num_warps=num_warps,
    )


def rope_case(dtype: str, num_heads: int, head_dim: int, has_norm: bool) -> KernelCase:
    from pluglm.triton_kernels.kernels.rope import rope_kernel

    block_heads, block_half, num_warps = rope_blocks(num_heads, head_dim)
    pointers = {f"{name}_pointer": dtype for name in ("x", "cos", "sin", "out")}
    weight = {"weight_pointer": "*fp32"} if has_norm else {}
    strides = {"x_row_stride": "i32", "x_head_stride": "i32"}
    sizes = {"HALF": head_dim // 2, "BLOCK_HEADS": block_heads, "BLOCK_HALF": block_half}
    return KernelCase(
        name=f"{'norm_' if has_norm else ''}rope {dtype[1:]} C={num_heads} H={head_dim}",
        fn=rope_kernel,
        signature={**pointers, **weight, **strides, "num_heads": "i32", "eps": "fp32"},
        constexprs={**({} if has_norm else {"weight_pointer": None}), "HAS_NORM": has_norm, **sizes},
        divisible=frozenset((*pointers, *weight, *strides)),
        num_warps=num_warps,
    )


def gated_case(dtype: str, form: str) -> KernelCase:
    """form: as the kernel's FORM."""
    from pluglm.triton_kernels.kernels.gated import gated_kernel

    block, num_warps = column_blocks(MLP_WIDTH)
    arguments = {"gate_up_pointer": dtype, "out_pointer": dtype, "row_stride": "i32", "num_columns": "i32"}
    return KernelCase(
        name=f"gated {form} {dtype[1:]}",
        fn=gated_kernel,
        signature=arguments,
        constexprs={"FORM": form, "BLOCK": block},
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
