"""One token a row from weights and a uniform: the draw behind a kept run, from a residual or from the target's row."""

from __future__ import annotations

import torch

from pluglm.verification.windows import Windows

# S: sequences, D: drafts of all of them, R: rows, V: vocabulary


def inverse_cdf(weights_RV: torch.Tensor, coins_R: torch.Tensor) -> torch.Tensor:
    """ids_R int64, always of a positive weight: the first id beyond coin * total of a float64 running sum in id order.

    weights_RV: float32 or float64, none negative, some positive in every row. coins_R: float64 in (0, 1).
    """
    running_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = running_RV[:, -1:].contiguous()
    # Rounding may lift coin * total to total, beyond which there is no token.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    goal_R1 = torch.minimum(coins_R.unsqueeze(1) * total_R1, below_R1)
    return torch.searchsorted(running_RV, goal_R1, right=True).squeeze(1)


def draw_last(windows: Windows, num_kept_S: torch.Tensor, reach_S: torch.Tensor | None = None) -> torch.Tensor:
    """ids_S int64: the bonus of a sequence whose drafts were all kept, else a draw in place of its first refused one.

    In place of it: from (reach * p - q)+, with reach 1 if it is not given; for fixed proposals from p without the
    refused id. If nothing is left of a row, which only rounding can do, from p.
    """
    row_SV = windows.target_TV.index_select(0, windows.first_row_S + num_kept_S).double()
    if not len(windows.drafts_D):
        return inverse_cdf(row_SV, windows.recover_S)
    refused_S = (windows.first_draft_S + num_kept_S).clamp_(max=len(windows.drafts_D) - 1)
    if windows.proposal_DV is None:
        rest_SV = row_SV.scatter(1, windows.drafts_D[refused_S].unsqueeze(1), 0.0)
    else:
        reached_SV = row_SV if reach_S is None else reach_S.unsqueeze(1) * row_SV
        rest_SV = (reached_SV - windows.proposal_DV.index_select(0, refused_S)).clamp_(min=0.0)
    is_usable_S = (num_kept_S < windows.num_drafts_S) & (rest_SV.amax(-1) > 0)
    return inverse_cdf(rest_SV.where(is_usable_S.unsqueeze(1), row_SV), windows.recover_S)
