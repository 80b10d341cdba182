"""Starts the kernel that cuts rows. Importing it imports no triton; launching does."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.launching import check_rows, launch, same

# R: rows, V: vocabulary

MOST_COLUMNS = 1 << 18  # sums of masses fit into int64
BLOCK, NUM_WARPS = 4096, 8  # 16 values a thread


def cut_rows(
    logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, gap_R: torch.Tensor, is_joint: bool
) -> torch.Tensor:
    """logits_RV, float32, with what top_k, top_p and min_p drop at -inf, in place.

    top_k_R: int32, 1 .. V, V is off. top_p_R: float64, 1 is off; of what top_k keeps, or of the whole row if is_joint.
    gap_R: float32, ln(min_p), -inf is off. Ties rank by lowest id. A row whose best logit is not finite stays.
    ValueError for shapes or dtypes that do not fit, more than MOST_COLUMNS columns, and where kernels cannot run.
    """
    check_rows("logits_RV", logits_RV, 2)
    num_rows, num_columns = logits_RV.shape
    same("the dtype of logits_RV", logits_RV.dtype, torch.float32)
    for name, tensor, dtype in (
        ("top_k_R", top_k_R, torch.int32), ("top_p_R", top_p_R, torch.float64), ("gap_R", gap_R, torch.float32)
    ):  # fmt: skip
        same(f"{name}'s dtype and shape", (tensor.dtype, tuple(tensor.shape)), (dtype, (num_rows,)))
    if num_columns > MOST_COLUMNS:
        raise ValueError(f"rows have {num_columns} logits; the kernel takes {MOST_COLUMNS}")

    def kernel() -> None:
        from pluglm_samplers.triton.cut import cut_kernel

        cut_kernel[(num_rows,)](
            logits_RV,
            top_k_R,
            top_p_R,
            gap_R,
            logits_RV.stride(0),
            num_columns,
            IS_JOINT=is_joint,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    if num_rows and num_columns > 1:  # nothing can be dropped of one token
        launch(kernel, logits_RV)
    return logits_RV
