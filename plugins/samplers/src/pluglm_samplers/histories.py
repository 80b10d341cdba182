"""The tokens of prompts and outputs as arrays, for steps that penalise what was already there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow

Ids = NDArray[np.int64]

_ROOM = 64  # tokens of an output at first


def as_ids(tokens: Sequence[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))


class _Growing:
    """An output as an array, to which each token is written once. What is written stays: arrays given out share it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._is_other = False  # the last output asked about was another text

    def ids(self, tokens: list[int]) -> Ids:
        """Of the output that is kept, or of how it goes on. Another text is kept instead when it comes twice in a row:
        branches take turns, and a refused draft does not come again."""
        known, length = self._tokens, len(tokens)
        num_shared = min(len(known), length)
        is_other, self._is_other = self._is_other, known[:num_shared] != tokens[:num_shared]
        if self._is_other:
            ids = as_ids(tokens)
            if is_other:
                self._tokens, self._ids, self._is_other = list(tokens), ids, False
            return ids
        if length > len(known):
            if length > len(self._ids):
                self._ids = np.concatenate((self._ids[: len(known)], np.empty(2 * length, dtype=np.int64)))
            added = tokens[num_shared:]
            self._ids[num_shared:length] = added
            known.extend(added)
        return self._ids[:length]


def outputs(rows: Sequence[SampleRow]) -> list[Ids]:
    """Not to be written to."""
    return [_output(row) for row in rows]


def _output(row: SampleRow) -> Ids:
    """Kept for all steps together, and not by position: what is kept is compared with the row's own text."""
    if row.memory is None:
        return as_ids(row.output_token_ids)
    known = row.memory.get(_Growing)
    if known is None:
        known = row.memory[_Growing] = _Growing()
    return known.ids(row.output_token_ids)


def texts(rows: Sequence[SampleRow], owner: object, window: int | None) -> list[Ids]:
    """The last `window` tokens of each row's prompt and output; None is all of them.

    owner: the step that asks, always with the same window; it is the key in the rows' memories.
    """
    whole = [np.concatenate((_prompt(row, owner, window), _output(row))) for row in rows]
    return whole if window is None else [one[-window:] for one in whole]


def _prompt(row: SampleRow, owner: object, window: int | None) -> Ids:
    """Made once for a lane, since it is asked for with every token, and freed with it."""
    known: Ids | None = None if row.memory is None else row.memory.get(owner)
    if known is None:
        known = as_ids(row.prompt_token_ids if window is None else row.prompt_token_ids[-window:])
        if row.memory is not None:
            row.memory[owner] = known
    return known
