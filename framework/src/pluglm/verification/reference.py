"""The rules for one sequence, plainly, in float64 by numpy: what the batched forms must equal, bit for bit on a CPU.

Each takes (p_KV [k + 1, V], drafts [k], q_KV [k, V] or None, coins [k], recover) and returns the run of 1 to k + 1 ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# K: rows of the window, V: vocabulary

Array = npt.NDArray[np.float64]


def pick(weights_V: Array, coin: float) -> int:
    running_V = np.cumsum(weights_V)
    goal = min(coin * running_V[-1], np.nextafter(running_V[-1], 0.0))
    return int(np.searchsorted(running_V, goal, side="right"))


def pick_rest(rest_V: Array, p_V: Array, coin: float) -> int:
    return pick(rest_V if rest_V.max() > 0 else p_V, coin)


def one_hot(token: int, width: int) -> Array:
    row_V: Array = np.eye(width)[token]
    return row_V


def reproducible(
    p_KV: Array, drafts: Sequence[int], q_KV: Array | None, coins: Sequence[float], recover: float
) -> list[int]:
    run: list[int] = []
    for place, coin in enumerate([*coins, recover]):
        run.append(pick(p_KV[place], coin))
        if run != list(drafts[: place + 1]):
            break
    return run


def token(p_KV: Array, drafts: Sequence[int], q_KV: Array | None, coins: Sequence[float], recover: float) -> list[int]:
    for place, (draft, coin) in enumerate(zip(drafts, coins, strict=True)):
        p_V = p_KV[place]
        q_V = one_hot(draft, len(p_V)) if q_KV is None else q_KV[place]
        if not coin * q_V[draft] < p_V[draft]:
            return [*drafts[:place], pick_rest(np.maximum(p_V - q_V, 0.0), p_V, recover)]
    return [*drafts, pick(p_KV[-1], recover)]


def block(p_KV: Array, drafts: Sequence[int], q_KV: Array | None, coins: Sequence[float], recover: float) -> list[int]:
    if q_KV is None:
        return token(p_KV, drafts, None, coins, recover)
    reach, kept, kept_reach = 1.0, 0, 1.0
    for place, (draft, coin) in enumerate(zip(drafts, coins, strict=True)):
        mass, q = reach * p_KV[place][draft], q_KV[place][draft]
        reach = min(mass / q, 1.0) if q > 0 else float(mass > 0)
        chance = reach
        if place + 1 < len(drafts):
            left = np.cumsum(np.maximum(reach * p_KV[place + 1] - q_KV[place + 1], 0.0))[-1]
            whole = left + (1.0 - reach)
            chance = left / whole if whole > 0 else 1.0
        if coin < chance:
            kept, kept_reach = place + 1, reach
    if kept == len(drafts):
        return [*drafts, pick(p_KV[-1], recover)]
    rest_V = np.maximum(kept_reach * p_KV[kept] - q_KV[kept], 0.0)
    return [*drafts[:kept], pick_rest(rest_V, p_KV[kept], recover)]


def siblings(
    p_KV: Array, drafts: Sequence[int], parents: Sequence[int], coins: Sequence[float], recover: float
) -> list[int]:
    """parents as in the batched form."""
    run, at, rest_V, left = list[int](), 0, p_KV[0].copy(), 1.0
    for place, (draft, coin) in enumerate(zip(drafts, coins, strict=True)):
        if parents[place] != at:
            continue
        if coin * left < rest_V[draft]:
            run, at, rest_V, left = [*run, draft], place + 1, p_KV[place + 1].copy(), 1.0
        else:
            left -= rest_V[draft]
            rest_V[draft] = 0.0
    return [*run, pick_rest(rest_V, p_KV[at], recover)]
