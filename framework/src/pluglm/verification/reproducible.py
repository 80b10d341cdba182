"""Sample and compare: every position is drawn from the target's own row; the run goes on while draw and draft agree.

With the coins that plain sampling would use at these positions, the run is what plain sampling gives, token by token.
"""

from __future__ import annotations

import torch

from pluglm.verification.drawing import inverse_cdf
from pluglm.verification.windows import Verdict, Windows


def reproducible(windows: Windows) -> Verdict:
    """Exact whatever the drafts are; proposals are of no use to it. Keeps a draft with p(draft).

    Coin i draws position i; recover_S draws the position behind the last draft.
    """
    row_D, bonus_S = windows.row_D, windows.first_row_S + windows.num_drafts_S
    coins_T = torch.empty(len(windows.target_TV), dtype=torch.float64, device=windows.coins_D.device)
    coins_T[row_D], coins_T[bonus_S] = windows.coins_D, windows.recover_S
    ids_T = inverse_cdf(windows.target_TV, coins_T)
    num_kept_S = windows.count_leading(ids_T[row_D] == windows.drafts_D)
    return Verdict(num_kept_S, ids_T[windows.first_row_S + num_kept_S])
