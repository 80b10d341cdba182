"""Launches the rotation of query and key heads, with the norm of each head before it in families that have one."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.launching import check_rows, launch, power_of_two, same, warps_for

# T: rows, C: query heads and then key heads of a row, H: head dim

_VALUES = 2048  # that a program turns at once, in each half
MOST_HEAD_DIM = 2 * _VALUES


def rope_blocks(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """BLOCK_HEADS, BLOCK_HALF and num_warps of a launch."""
    block_half = power_of_two(head_dim // 2)
    block_heads = min(power_of_two(num_heads), max(_VALUES // block_half, 1))
    return block_heads, block_half, warps_for(2 * block_heads * block_half)


def rope(
    x_TCH: torch.Tensor,
    cos_T1H: torch.Tensor,
    sin_T1H: torch.Tensor,
    weight_CH: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """All heads turned by their row's angles, in x's dtype: `models.rope.rotate`, float32 inside and rounded once.

    x_TCH may be the view of the q and k part of a fused product; cos_T1H and sin_T1H are contiguous, their halves equal
    but for the sign: the first half of the sine is negated. weight_CH, contiguous: heads are normalised with it and eps
    first. ValueError for shapes that do not fit and where kernels cannot run.
    """
    _check(x_TCH, cos_T1H, sin_T1H, weight_CH)
    num_rows, num_heads, head_dim = x_TCH.shape
    block_heads, block_half, num_warps = rope_blocks(num_heads, head_dim)
    out_TCH = torch.empty((num_rows, num_heads, head_dim), dtype=x_TCH.dtype, device=x_TCH.device)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.rope import rope_kernel

        rope_kernel[(num_rows, -(-num_heads // block_heads))](
            x_TCH,
            weight_CH,
            cos_T1H,
            sin_T1H,
            out_TCH,
            x_TCH.stride(0),
            x_TCH.stride(1),
            num_heads,
            eps,
            HAS_NORM=weight_CH is not None,
            HALF=head_dim // 2,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=num_warps,
        )

    if out_TCH.numel():
        launch(kernel, x_TCH)
    return out_TCH


def _check(x_TCH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor, weight_CH: torch.Tensor | None) -> None:
    check_rows("x_TCH", x_TCH, 3)
    num_rows, num_heads, head_dim = x_TCH.shape
    for name, angles in (("cos_T1H", cos_T1H), ("sin_T1H", sin_T1H)):
        check_rows(name, angles, 3)
        if angles.shape != (num_rows, 1, head_dim) or not angles.is_contiguous():
            expected = f"contiguous of shape {(num_rows, 1, head_dim)}"
            raise ValueError(f"{name} has shape {tuple(angles.shape)} and strides {angles.stride()}, not {expected}")
    same("the remainder of the head dim by 2", head_dim % 2, 0)
    if weight_CH is not None:
        check_rows("weight_CH", weight_CH, 2)
        same("the shape of weight_CH", tuple(weight_CH.shape), (num_heads, head_dim))
        same("that weight_CH is contiguous", weight_CH.is_contiguous(), True)
