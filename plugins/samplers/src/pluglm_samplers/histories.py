"""The tokens of prompts and outputs as arrays, for steps that penalise what was already there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow

Ids = NDArray[np.int64]


def as_ids(tokens: Sequence[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))


def outputs(rows: Sequence[SampleRow]) -> list[Ids]:
    return [as_ids(row.output_token_ids) for row in rows]


def texts(rows: Sequence[SampleRow], owner: object, window: int | None) -> list[Ids]:
    """The last `window` tokens of each row's prompt and output; None is all of them.

    owner: the step that asks, always with the same window; it is the key in the rows' memories.
    """
    whole = [np.concatenate((_prompt(row, owner, window), as_ids(row.output_token_ids))) for row in rows]
    return whole if window is None else [one[-window:] for one in whole]


def _prompt(row: SampleRow, owner: object, window: int | None) -> Ids:
    """Made once for a lane, since it is asked for with every token, and freed with it."""
    known: Ids | None = None if row.memory is None else row.memory.get(owner)
    if known is None:
        known = as_ids(row.prompt_token_ids if window is None else row.prompt_token_ids[-window:])
        if row.memory is not None:
            row.memory[owner] = known
    return known
