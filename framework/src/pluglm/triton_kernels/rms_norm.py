"""Launches the RMS normalisation of rows, with or without a residual addition before it."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.launching import MOST_FEATURES, check_rows, launch, power_of_two, same, warps_for

# T: rows, D: features


def norm_blocks(num_features: int) -> tuple[int, int]:
    """BLOCK and num_warps of a launch. ValueError for rows that no program can hold."""
    if not 0 < num_features <= MOST_FEATURES:
        raise ValueError(f"rows of {num_features} features; 1 to {MOST_FEATURES} fit in one program")
    block = power_of_two(num_features)
    return block, warps_for(block)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """x / rms(x) * (offset + weight) in x's dtype, as `models.norms.row_norm`; float32 inside, rounded once.

    x_TD may have any row stride. ValueError for shapes that do not fit and where kernels cannot run.
    """
    return _normalised(x_TD, None, weight_D, eps, offset)[0]


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, both new and in x's dtype; the norm is of the rounded sum."""
    check_rows("residual_TD", residual_TD, 2)
    same("the shape of residual_TD", residual_TD.shape, x_TD.shape)
    same("the dtype of residual_TD", residual_TD.dtype, x_TD.dtype)
    return _normalised(x_TD, residual_TD, weight_D, eps, offset)


def _normalised(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("x_TD", x_TD, 2)
    check_rows("weight_D", weight_D, 1)
    num_rows, num_features = x_TD.shape
    same("the length of weight_D", len(weight_D), num_features)
    block, num_warps = norm_blocks(num_features)
    out_TD = torch.empty((num_rows, num_features), dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = out_TD if residual_TD is None else torch.empty_like(out_TD)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.rms_norm import rms_norm_kernel

        rms_norm_kernel[(num_rows,)](
            x_TD,
            residual_TD,
            weight_D,
            out_TD,
            None if residual_TD is None else sum_TD,
            x_TD.stride(0),
            0 if residual_TD is None else residual_TD.stride(0),
            num_features,
            eps,
            offset,
            HAS_RESIDUAL=residual_TD is not None,
            BLOCK=block,
            num_warps=num_warps,
        )

    if num_rows:
        launch(kernel, x_TD.device)
    return out_TD, sum_TD
