"""The tokens of prompts and outputs as arrays, for steps that penalise what was already there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow

Ids = NDArray[np.int64]

_MAX_PROMPTS = 1024


class Prompts:
    """Prompts as arrays, made once: they are asked for with every token of a request."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], Ids]] = {}  # by id, of tuples that are kept alive here

    def __call__(self, prompt: tuple[int, ...]) -> Ids:
        known = self._known.get(id(prompt))
        if known is None:
            if len(self._known) >= _MAX_PROMPTS:
                self._known.clear()
            known = self._known[id(prompt)] = prompt, as_ids(prompt)
        return known[1]


def as_ids(tokens: Sequence[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))


def outputs(rows: Sequence[SampleRow]) -> list[Ids]:
    return [as_ids(row.output_token_ids) for row in rows]


def texts(rows: Sequence[SampleRow], prompts: Prompts, window: int | None) -> list[Ids]:
    """The last `window` tokens of each row's prompt and output; None is all of them."""
    whole = [np.concatenate((prompts(row.prompt_token_ids), as_ids(row.output_token_ids))) for row in rows]
    return whole if window is None else [one[-window:] for one in whole]
