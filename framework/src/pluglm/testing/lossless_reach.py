"""How often the first drafts are kept under each rule, in closed form, from p and q of the drafts, [C, n] each.

Column i of the result is the chance that the first i + 1 drafts are all kept, given the drafts.
"""

from __future__ import annotations

import numpy as np

from pluglm.testing.lossless_boxes import Floats

# C: cases, n: drafts of a case


def token_reach(p_Cn: Floats, q_Cn: Floats) -> Floats:
    """The product of min(1, p / q) (Leviathan et al., 2023); q is positive for what was drawn from it."""
    return np.minimum(1.0, p_Cn / q_Cn).cumprod(1)


def block_reach(p_Cn: Floats, q_Cn: Floats) -> Floats:
    """r_i = min(r_(i-1) p_i / q_i, 1) (Sun et al., 2024)."""
    reach_C, found = np.ones(len(p_Cn)), np.empty_like(p_Cn)
    for place in range(p_Cn.shape[1]):
        found[:, place] = reach_C = np.minimum(reach_C * p_Cn[:, place] / q_Cn[:, place], 1.0)
    return found


def fixed_reach(p_Cn: Floats, q_Cn: Floats) -> Floats:
    """The product of p: fixed proposals, and any that are compared with a draw of the target."""
    return p_Cn.cumprod(1)
