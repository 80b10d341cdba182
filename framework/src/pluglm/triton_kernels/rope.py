"""Launches the rotation of query and key heads."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.launching import check_rows, launch, power_of_two, same, warps_for

# T: rows, C: query heads and then key heads of a row, H: head dim

_VALUES = 2048  # that a program turns at once, in each half


def rope_blocks(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """BLOCK_HEADS, BLOCK_HALF and num_warps of a launch."""
    block_half = power_of_two(head_dim // 2)
    block_heads = min(power_of_two(num_heads), max(_VALUES // block_half, 1))
    return block_heads, block_half, warps_for(2 * block_heads * block_half)


def rope(x_TCH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> torch.Tensor:
    """All heads turned by their row's angles, in x's dtype: `models.rope.rotate`, float32 inside and rounded once.

    x_TCH may be the view of the q and k part of a fused product; cos_T1H and sin_T1H are contiguous, their halves equal
    but for the sign: the first half of the sine is negated. ValueError for shapes that do not fit and where kernels
    cannot run.
    """
    check_rows("x_TCH", x_TCH, 3)
    num_rows, num_heads, head_dim = x_TCH.shape
    for name, angles in (("cos_T1H", cos_T1H), ("sin_T1H", sin_T1H)):
        check_rows(name, angles, 3)
        same(f"the shape of {name}", tuple(angles.shape), (num_rows, 1, head_dim))
        same(f"that {name} is contiguous", angles.is_contiguous(), True)
    same("the remainder of the head dim by 2", head_dim % 2, 0)
    block_heads, block_half, num_warps = rope_blocks(num_heads, head_dim)
    out_TCH = torch.empty((num_rows, num_heads, head_dim), dtype=x_TCH.dtype, device=x_TCH.device)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.rope import rope_kernel

        rope_kernel[(num_rows, -(-num_heads // block_heads))](
            x_TCH,
            cos_T1H,
            sin_T1H,
            out_TCH,
            x_TCH.stride(0),
            x_TCH.stride(1),
            num_heads,
            HALF=head_dim // 2,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=num_warps,
        )

    if out_TCH.numel():
        launch(kernel, x_TCH.device)
    return out_TCH
