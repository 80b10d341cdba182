"""Prompt lookup: what followed the latest earlier occurrence of a text's last n tokens. A plain search and an index.

The method is prompt lookup decoding (Saxena, 2023). Nothing here knows requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence


def plain_search(token_ids: Sequence[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The reference: the longest suffix first, its latest earlier occurrence, then up to num_tokens that followed.

    Occurrences may overlap the suffix. Empty when no suffix of min_ngram tokens or more occurred before.
    """
    known = list(token_ids)
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == known[-size:]:
                return known[start + size : start + size + num_tokens]
    return []


class NgramIndex:
    """The same answers as plain_search for one growing text, at the cost of its new tokens alone."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in range(max_ngram, min_ngram - 1, -1)}
        self._num_indexed = 0  # n-grams that end at or before this token are in

    def search(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """token_ids starts with what was shown before; a shorter text starts the index afresh."""
        _, end = self.longest(token_ids)
        return token_ids[end : end + num_tokens]

    def longest(self, token_ids: list[int]) -> tuple[int, int]:
        """(tokens of the suffix that occurred before, where its latest earlier occurrence ends); (0, length): none."""
        if len(token_ids) <= self._num_indexed:
            self._forget()
        self._index(token_ids)
        for size, ends in self._ends.items():
            end = ends.get(tuple(token_ids[-size:]))
            if end is not None:
                return size, end
        return 0, len(token_ids)

    def _index(self, token_ids: list[int]) -> None:
        # The text's own end stays out: an occurrence counts only when something followed it.
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size, ends in self._ends.items():
                if size <= end:
                    ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(len(token_ids) - 1, 0)

    def _forget(self) -> None:
        for ends in self._ends.values():
            ends.clear()
        self._num_indexed = 0
