"""Block verification (Sun et al., "Block verification accelerates speculative decoding", 2024, arXiv:2403.10444)."""

from __future__ import annotations

import torch

from pluglm.verification.drawing import draw_last
from pluglm.verification.token_wise import token
from pluglm.verification.windows import Verdict, Windows

# S: sequences, D: drafts of all of them, A: sequences with a draft at a place, B: those with one more, V: vocabulary


def block(windows: Windows) -> Verdict:
    """Keeps the longest prefix whose coin passes; on average no fewer drafts than `token` from the same rows.

    With r_0 = 1 and r_i = min(r_(i-1) p_i / q_i, 1), prefix i < k passes with S / (S + 1 - r_i), where S is the sum of
    (r_i p_(i+1) - q_(i+1))+ (with 1 if that is 0 / 0), and prefix k with r_k. Behind i < k kept drafts comes a draw
    from (r_i p_(i+1) - q_(i+1))+. Fixed proposals are verified by `token`.
    """
    if windows.proposal_DV is None:
        return token(windows)
    reach_S, num_kept_S = torch.ones_like(windows.recover_S), torch.zeros_like(windows.first_draft_S)
    kept_reach_S = reach_S.clone()
    p_D, q_D = windows.target_of_drafts(), windows.proposal_of_drafts()
    for place in range(max(windows.num_drafts, default=0)):
        ids_A = windows.having(place)
        draft_A = windows.first_draft_S[ids_A] + place
        reach_A = reach_S[ids_A] * p_D[draft_A] / q_D[draft_A]
        reach_A = reach_A.nan_to_num_(nan=0.0, posinf=1.0).clamp_(max=1.0)  # a q of 0, which nothing is drawn from
        reach_S[ids_A] = reach_A
        passes_A = windows.coins_D[draft_A] < _chances(windows, place, ids_A, reach_A)
        num_kept_S[ids_A] = torch.where(passes_A, place + 1, num_kept_S[ids_A])
        kept_reach_S[ids_A] = torch.where(passes_A, reach_A, kept_reach_S[ids_A])
    return Verdict(num_kept_S, draw_last(windows, num_kept_S, kept_reach_S))


def _chances(windows: Windows, place: int, ids_A: torch.Tensor, reach_A: torch.Tensor) -> torch.Tensor:
    """With what chance the prefix that ends with the draft at `place` passes, float64 [A]."""
    ids_B = windows.having(place + 1)
    if not len(ids_B) or windows.proposal_DV is None:
        return reach_A
    on_B = torch.searchsorted(ids_A, ids_B)
    reach_B = reach_A[on_B]
    p_BV = windows.target_TV.index_select(0, windows.first_row_S[ids_B] + place + 1)
    q_BV = windows.proposal_DV.index_select(0, windows.first_draft_S[ids_B] + place + 1)
    # cumsum, never sum: how torch splits a sum among threads depends on the number of rows, and so would its bits.
    left_B = (reach_B.unsqueeze(1) * p_BV - q_BV).clamp_(min=0.0).cumsum(-1)[:, -1]
    whole_B = left_B + (1.0 - reach_B)  # in this order: a tiny S is not lost beside 1
    return reach_A.index_copy(0, on_B, (left_B / whole_B).where(whole_B > 0, 1.0))
