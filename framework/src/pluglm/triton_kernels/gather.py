"""Launches the gathering of rows."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.gated import column_blocks
from pluglm.triton_kernels.launching import check_rows, launch, same

# T: rows, R: rows that are asked for, D: features


def gather_rows(x_TD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """x_TD[rows_R], new and contiguous. rows_R: int64, contiguous, each in [0, T), which nothing checks.

    ValueError for shapes that do not fit and where kernels cannot run.
    """
    check_rows("x_TD", x_TD, 2)
    same("the dtype of rows_R", rows_R.dtype, torch.int64)
    same("that rows_R is contiguous", rows_R.dim() == 1 and rows_R.is_contiguous(), True)
    num_columns = x_TD.shape[1]
    block, num_warps = column_blocks(num_columns)
    out_RD = torch.empty((len(rows_R), num_columns), dtype=x_TD.dtype, device=x_TD.device)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.gather import gather_rows_kernel

        grid = (len(rows_R), -(-num_columns // block))
        gather_rows_kernel[grid](x_TD, rows_R, out_RD, x_TD.stride(0), num_columns, BLOCK=block, num_warps=num_warps)

    if out_RD.numel():
        launch(kernel, x_TD)
    return out_RD
