"""The draft model's KV, one table per sequence, and which tokens it holds. Knows no model and draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pluglm.kernel.core import BlockCopies
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVManager, KVTransaction


class DraftCache:
    """`tokens` of a sequence are those whose KV is stored, in order; its table may have room for more.

    num_exhausted counts the reservations that found no room.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._tokens: dict[int, list[int]] = {}
        self.num_exhausted = 0

    def num_usable(self, sequence_id: int, token_ids: list[int]) -> int:
        """How many leading tokens need not be computed again. At least the last one always is, for its logits."""
        stored = self._tokens.get(sequence_id, [])
        limit = min(len(stored), len(token_ids) - 1)
        if stored[:limit] == token_ids[:limit]:
            return limit
        return next(index for index in range(limit) if stored[index] != token_ids[index])

    def reserve(self, wanted: Mapping[int, tuple[int, int]]) -> tuple[set[int], BlockCopies]:
        """wanted: sequence_id -> (leading tokens to keep, tokens in all). Returns who has room, and block copies to do.

        A sequence without room keeps its leading tokens; the others are not affected.
        """
        roomy = set()
        with self._changes() as (transaction, copies):
            for sequence_id, (num_kept, num_tokens) in wanted.items():
                if self._make_room(transaction, sequence_id, num_kept, num_tokens):
                    roomy.add(sequence_id)
        for sequence_id in roomy:
            self._tokens.setdefault(sequence_id, [])
        for sequence_id in wanted.keys() & self._tokens.keys():
            del self._tokens[sequence_id][wanted[sequence_id][0] :]
        return roomy, tuple(copies)

    def note(self, sequence_id: int, token_ids: list[int]) -> None:
        """The KV of exactly these tokens is stored now."""
        self._tokens[sequence_id] = token_ids

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Forget what lies beyond num_tokens. A sequence without a table is left alone."""
        if sequence_id in self._tokens:
            with self._changes() as (transaction, _):
                transaction.trim(sequence_id, num_tokens)
            del self._tokens[sequence_id][num_tokens:]

    def release(self, sequence_id: int) -> None:
        """A sequence without a table is left alone."""
        if sequence_id in self._tokens:
            with self._changes() as (transaction, _):
                transaction.release(sequence_id)
            del self._tokens[sequence_id]

    def _make_room(self, transaction: KVTransaction, sequence_id: int, num_kept: int, num_tokens: int) -> bool:
        is_new = sequence_id not in self._tokens
        if is_new:
            transaction.acquire(sequence_id)
        transaction.trim(sequence_id, num_kept)  # the tokens beyond are written anew, and `extend` must know it
        try:
            transaction.extend(sequence_id, num_tokens)
        except KVExhausted:
            self.num_exhausted += 1
            if is_new:
                transaction.release(sequence_id)
            return False
        return True

    @contextmanager
    def _changes(self) -> Iterator[tuple[KVTransaction, list[tuple[int, int]]]]:
        """One transaction, committed at the end; the block copies that it asks for are added to the list."""
        copies: list[tuple[int, int]] = []
        transaction = self._kv.transaction()
        try:
            yield transaction, copies
        except BaseException:
            transaction.rollback()
            raise
        copies.extend(transaction.commit())
