"""How many tokens mirostat 1 keeps: it takes the row for Zipf's law and estimates that law's exponent."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm_samplers.ranking import sort_best

# R: rows, V: vocabulary, m: best tokens that the exponent is estimated from

MOST = 100


def zipf_counts(logits_RV: torch.Tensor, mu_R: NDArray[np.float64]) -> torch.Tensor:
    """counts_R int64, 1 .. V: k = (e 2**mu / (1 - n**-e)) ** (1 / s), rounded down (Basu et al., 2021, section 4).

    s is the exponent, e = s - 1, mu in bits. n counts the live tokens, so masked ones and padding change nothing. 1 for
    a row that has no two live tokens, or NaN.
    """
    best_Rm = sort_best(logits_RV, min(MOST, logits_RV.shape[1])).double().cpu().numpy()
    num_live_R = (logits_RV > -torch.inf).sum(-1).cpu().numpy()
    with np.errstate(all="ignore"):
        s_R = _exponents(best_Rm)
        log_live_R = np.log(num_live_R)
        x_R = (s_R - 1) * log_live_R
        share_R = np.where(x_R == 0, 1.0, x_R / -np.expm1(-x_R))  # e / (1 - n**-e) is this over ln n, also at e = 0
        counts_R = np.exp((np.log(share_R / log_live_R) + mu_R * math.log(2)) / s_R)
    whole_R = np.nan_to_num(np.minimum(counts_R, logits_RV.shape[1]), nan=1.0).clip(1).astype(np.int64)
    return torch.from_numpy(whole_R).to(logits_RV.device)


def _exponents(best_Rm: NDArray[np.float64]) -> NDArray[np.float64]:
    """s_R: the least squares fit of ln(p_i / p_(i + 1)) = s ln((i + 1) / i) over the live ones of the best tokens."""
    is_live_Rm = best_Rm[:, 1:] > -np.inf
    ranks_m = np.arange(1, best_Rm.shape[1])
    steps_Rm = np.where(is_live_Rm, np.log((ranks_m + 1) / ranks_m), 0.0)
    gaps_Rm = np.where(is_live_Rm, best_Rm[:, :-1] - best_Rm[:, 1:], 0.0)
    exponents_R: NDArray[np.float64] = (steps_Rm * gaps_Rm).sum(-1) / np.square(steps_Rm).sum(-1)
    return exponents_R
