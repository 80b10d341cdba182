"""Launches the RMS normalisation of rows and the residual addition around it."""

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
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, None, weight_D, out_TD, None, eps, offset)
    return out_TD


def add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    x_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, both new and in x's dtype; the norm is of the rounded sum.

    x_weight_D: x is normalised with it first, and not rounded in between.
    """
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = torch.empty_like(out_TD)
    _launch(x_TD, residual_TD, x_weight_D, weight_D, out_TD, sum_TD, eps, offset)
    return out_TD, sum_TD


def add_rows(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    eps: float = 0.0,
    offset: float = 0.0,
    x_weight_D: torch.Tensor | None = None,
) -> torch.Tensor:
    """x + residual, new and in x's dtype. x_weight_D, eps, offset: x is normalised with them first, if given."""
    sum_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, residual_TD, x_weight_D, None, None, sum_TD, eps, offset)
    return sum_TD


def _launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    x_weight_D: torch.Tensor | None,
    weight_D: torch.Tensor | None,
    out_TD: torch.Tensor | None,
    sum_TD: torch.Tensor | None,
    eps: float,
    offset: float,
) -> None:
    check_rows("x_TD", x_TD, 2)
    _check_weight("x_weight_D", x_weight_D, x_TD)
    _check_weight("weight_D", weight_D, x_TD)
    _check_residual(residual_TD, x_TD)
    num_rows, num_features = x_TD.shape
    block, num_warps = norm_blocks(num_features)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.rms_norm import rms_norm_kernel

        rms_norm_kernel[(num_rows,)](
            x_TD,
            residual_TD,
            x_weight_D,
            weight_D,
            out_TD,
            sum_TD,
            x_TD.stride(0),
            0 if residual_TD is None else residual_TD.stride(0),
            num_features,
            eps,
            offset,
            NORMS_X=x_weight_D is not None,
            HAS_RESIDUAL=residual_TD is not None,
            NORMS_SUM=weight_D is not None,
            BLOCK=block,
            num_warps=num_warps,
        )

    if num_rows:
        launch(kernel, x_TD)


def _check_weight(name: str, weight_D: torch.Tensor | None, x_TD: torch.Tensor) -> None:
    if weight_D is not None:
        check_rows(name, weight_D, 1)
        if weight_D.shape[0] != x_TD.shape[1]:
            raise ValueError(f"the length of {name} is {weight_D.shape[0]}, not {x_TD.shape[1]}")


def _check_residual(residual_TD: torch.Tensor | None, x_TD: torch.Tensor) -> None:
    if residual_TD is not None:
        check_rows("residual_TD", residual_TD, 2)
        same("the shape of residual_TD", residual_TD.shape, x_TD.shape)
        same("the dtype of residual_TD", residual_TD.dtype, x_TD.dtype)
