"""Token-wise verification (Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023)."""

from __future__ import annotations

from pluglm.verification.drawing import draw_last
from pluglm.verification.windows import Verdict, Windows


def token(windows: Windows) -> Verdict:
    """Keeps a draft x with min(1, p(x) / q(x)); at the first refusal draws from (p - q)+, behind k kept ones from p.

    Fixed proposals are those of a one-hot q: kept with p(x), else a draw from p without x. That is exact, and keeps
    fewer drafts, for drawn ones whose q is not known.
    """
    # Strict: not even a coin of 0 keeps what the target never says.
    is_kept_D = windows.coins_D * windows.proposal_of_drafts() < windows.target_of_drafts()
    num_kept_S = windows.count_leading(is_kept_D)
    return Verdict(num_kept_S, draw_last(windows, num_kept_S))
