"""Every attention kernel in the forms it is launched in, for compiling ahead of time. Imports triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pluglm.triton_kernels.aot import KernelCase
from pluglm_attention.triton.flash import flash_kernel
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, FP8_CAPABILITY, HEAD_DIMS, Kernel
from pluglm_attention.triton.launch_scatter import scatter_blocks
from pluglm_attention.triton.scatter import scatter_kernel
from pluglm_attention.triton.unified import reduce_kernel, unified_kernel

GROUP = 4  # query heads of a kv head
BLOCK_SIZE = 16
_SCALES = ("k_scales", "v_scales")


def usual_cases(arch: int) -> Iterator[KernelCase]:
    """Each kernel in both half types, and decode and scatter in a KV format that the architecture is best at."""
    formats = ("i8", "fp8e4nv") if arch >= FP8_CAPABILITY else ("i8",)
    for dtype, head_dim in (("bf16", 128), ("fp16", 64)):
        yield from (attention_case(kernel, arch, dtype, head_dim) for kernel in ("prefill", "decode", "flash"))
        yield reduce_case(dtype, head_dim)
        yield scatter_case(dtype, dtype, head_dim)
    yield attention_case("decode", arch, "bf16", 64, stored=formats[-1])
    yield from (scatter_case("bf16", stored, 64) for stored in formats)


def other_cases(arch: int) -> Iterator[KernelCase]:
    """All of the launch table: every head dim, one that is no power of two, quantised storage, windows with soft caps,
    float32."""
    formats = ("i8", "fp8e4nv") if arch >= FP8_CAPABILITY else ("i8",)
    for head_dim in (*HEAD_DIMS, 80):
        yield reduce_case("bf16", head_dim)
        for kernel in ("prefill", "decode", "flash"):
            yield attention_case(kernel, arch, "bf16", head_dim)
            yield attention_case(kernel, arch, "bf16", head_dim, window=1000, soft_cap=30.0)
            yield attention_case(kernel, arch, "fp32", head_dim)
        for stored in formats:
            yield attention_case("quantised", arch, "fp16", head_dim, stored=stored)
            yield attention_case("decode", arch, "fp16", head_dim, stored=stored)


def attention_case(
    kernel: Kernel,
    arch: int,
    dtype: str,
    head_dim: int,
    *,
    stored: str | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> KernelCase:
    """The entry of the launch table for this kernel and dtype ("bf16"). stored: what keys are in, None is dtype."""
    head_pad = 1 << (head_dim - 1).bit_length()
    config = DEFAULT_TABLE["float32" if dtype == "fp32" else kernel, arch, head_pad]
    pointers = {"q": dtype, "out": dtype, "keys": stored or dtype, "values": stored or dtype, "cu_query": "i32"}
    pointers["num_context"] = "i32"
    constexprs: dict[str, Any] = {"GROUP": GROUP, "HEAD_DIM": head_dim, "HEAD_PAD": head_pad}
    constexprs |= {"WINDOW": window, "SOFT_CAP": soft_cap, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    strides = ("q_token", "q_head", "row_stride" if kernel == "flash" else "slot_stride", "head_stride")
    integers = [*strides, "num_segments"]
    if kernel == "flash":
        pointers["first_rows"] = "i32"
    else:
        pointers["block_tables"] = "i32"
        integers += ["table_stride"]
        constexprs |= {"BLOCK_SIZE": BLOCK_SIZE, "ONE_TILE": kernel == "decode"} | ({} if stored else _no(_SCALES))
        pointers |= dict.fromkeys(_SCALES, "fp32") if stored else {}
        pointers |= {"out": "fp32", "log_sums": "fp32"} if kernel == "decode" else {}
        constexprs |= {} if kernel == "decode" else _no(("log_sums",))
    form = f"{f' over {stored}' if stored else ''}{' window' if window else ''}{' soft cap' if soft_cap else ''}"
    return KernelCase(
        name=f"attention {kernel} {dtype}{form} H={head_dim}",
        fn=flash_kernel if kernel == "flash" else unified_kernel,
        signature={**_pointers(pointers), **dict.fromkeys(integers, "i32"), "scale": "fp32"},
        constexprs=constexprs,
        divisible=frozenset((*pointers, *strides)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reduce_case(dtype: str, head_dim: int) -> KernelCase:
    pointers = {"partial": "fp32", "log_sums": "fp32", "out": dtype}
    head_pad = 1 << (head_dim - 1).bit_length()
    return KernelCase(
        name=f"attention reduce {dtype} H={head_dim}",
        fn=reduce_kernel,
        signature={**_pointers(pointers), "num_splits": "i32"},
        constexprs={"HEAD_DIM": head_dim, "HEAD_PAD": head_pad, "SPLITS": 128, "BLOCK_P": 16},
        divisible=frozenset(pointers),
    )


def scatter_case(dtype: str, stored: str, head_dim: int) -> KernelCase:
    """8 kv heads, in as many programs as launch_scatter makes of them."""
    strides = [f"{tensor}_{axis}" for tensor in ("k", "v") for axis in ("token", "head")]
    strides += [f"{tensor}_{axis}" for tensor in ("keys", "values") for axis in ("slot", "head")]
    pointers = {"k": dtype, "v": dtype, "slots": "i64", "keys": stored, "values": stored}
    pointers |= {} if stored == dtype else dict.fromkeys(_SCALES, "fp32")
    head_pad, block_k = scatter_blocks(8, head_dim)
    constexprs = {"HEADS": 8, "HEAD_DIM": head_dim, "HEAD_PAD": head_pad, "BLOCK_K": block_k}
    return KernelCase(
        name=f"attention scatter {dtype} to {stored} H={head_dim}",
        fn=scatter_kernel,
        signature={**_pointers(pointers), **dict.fromkeys(strides, "i32")},
        constexprs=constexprs | (_no(_SCALES) if stored == dtype else {}),
        divisible=frozenset((*pointers, *strides)),
    )


def _pointers(types: dict[str, str]) -> dict[str, str]:
    return {name: f"*{kind}" for name, kind in types.items()}


def _no(names: tuple[str, ...]) -> dict[str, Any]:
    return dict.fromkeys(names)
