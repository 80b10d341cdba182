"""The kernels of the samplers in the forms they are launched in, for compiling ahead of time. Imports triton."""

from __future__ import annotations

from collections.abc import Iterator

from pluglm.triton_kernels.aot import KernelCase
from pluglm_samplers.triton.cut import cut_kernel
from pluglm_samplers.triton.launch import BLOCK, NUM_WARPS

_POINTERS = {"logits_pointer": "*fp32", "top_k_pointer": "*i32", "top_p_pointer": "*fp64", "gap_pointer": "*fp32"}
_SIZES = {"row_stride": "i32", "num_columns": "i32"}


def sampler_cases() -> Iterator[KernelCase]:
    """top_p of what top_k keeps, and of the whole row."""
    for is_joint in (False, True):
        yield KernelCase(
            name=f"cut{' joint' if is_joint else ''} fp32",
            fn=cut_kernel,
            signature={**_POINTERS, **_SIZES},
            constexprs={"IS_JOINT": is_joint, "BLOCK": BLOCK},
            divisible=frozenset((*_POINTERS, *_SIZES)),
            num_warps=NUM_WARPS,
        )
