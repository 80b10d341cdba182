"""One step's changes to the books of a KV manager, kept aside until commit. Knows blocks, never what they contain."""

from __future__ import annotations

from collections.abc import Callable

from pluglm.kernel.core import BlockCopies, CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kv.books import Books, Table, new_table


class Closing:
    """A transaction that is open until it is committed or rolled back, once. close: tells its manager."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._is_open = True

    def _end(self) -> None:
        self._is_open = False
        self._close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the KV transaction is closed; open a new one with transaction()")


class BlockTransaction(Closing):
    """The KVTransaction of every manager here. The books change in `commit` alone, so rollback has nothing to undo.

    Copy on write: the manager never sees a write, but tokens are only written after the `extend` that covers them.
    So `extend` replaces a shared last block that is partly filled, whichever holder extends first; the last holder
    keeps the original. To rewrite tokens, `trim` to them before extending again; and fork a sequence only when its
    tokens are written, since copies are made before the step writes.
    """

    def __init__(self, books: Books, block_size: int, max_blocks: int, close: Callable[[], None]) -> None:
        super().__init__(close)
        self._books = books
        self._block_size = block_size
        self._max_blocks = max_blocks  # of one sequence
        self._tables: dict[int, Table | None] = {}  # what differs from the books; None is released
        self._shares: dict[int, int] = {}
        self._num_taken = 0  # from the end of books.free
        self._returned: list[int] = []
        self._sources: dict[int, int] = {}  # block to be filled -> block whose present content it gets

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        """An empty table, whatever the key: nothing is cached here."""
        self._start(sequence_id, Table())
        return 0

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        table = self._table(sequence_id)
        if num_tokens <= table.num_tokens:
            return
        blocks, offset = table.blocks, table.num_tokens % self._block_size
        num_new = -(-num_tokens // self._block_size) - len(blocks)
        if len(blocks) + num_new > self._max_blocks:
            self._refuse(sequence_id, num_tokens, num_new, evict)
        is_copied = offset > 0 and self._needs_copy(blocks[-1], offset, num_new, evict)
        if num_new or is_copied:
            if num_new + is_copied > self.free_blocks(evict):
                self._refuse(sequence_id, num_tokens, num_new + is_copied, evict)
            self._make_room(num_new + is_copied)
            kept = (*blocks[:-1], self._take_copy(blocks[-1])) if is_copied else blocks
            blocks = (*kept, *(self._take() for _ in range(num_new)))
        self._tables[sequence_id] = new_table(blocks, num_tokens)

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"KV sequence {sequence_id} cannot be trimmed to {num_tokens} tokens")
        table = self._table(sequence_id)
        if num_tokens >= table.num_tokens:
            return
        num_blocks = -(-num_tokens // self._block_size)
        self._tables[sequence_id] = Table(table.blocks[:num_blocks], num_tokens)
        for block in reversed(table.blocks[num_blocks:]):
            self._drop(block)

    def fork(self, parent_id: int, child_id: int) -> None:
        table = self._table(parent_id)
        self._start(child_id, table)
        for block in table.blocks:
            self._shares[block] = self._num_holders(block) + 1

    def release(self, sequence_id: int) -> None:
        table = self._table(sequence_id)
        self._tables[sequence_id] = None
        for block in reversed(table.blocks):
            self._drop(block)

    def free_blocks(self, evict: bool = True) -> int:
        self._require_open()
        return len(self._books.free) - self._num_taken + len(self._returned)

    def commit(self) -> BlockCopies:
        self._require_open()
        self._apply()
        self._end()
        return tuple((source, target) for target, source in self._sources.items())

    def rollback(self) -> None:
        self._require_open()
        self._end()

    def _apply(self) -> None:
        books = self._books
        del books.free[len(books.free) - self._num_taken :]
        books.free += self._returned
        for block, count in self._shares.items():
            if count > 1:
                books.shares[block] = count
            else:
                books.shares.pop(block, None)
        for sequence_id, table in self._tables.items():
            if table is None:
                books.tables.pop(sequence_id, None)
            else:
                books.tables[sequence_id] = table

    def _find(self, sequence_id: int) -> Table | None:
        if sequence_id in self._tables:
            return self._tables[sequence_id]
        return self._books.tables.get(sequence_id)

    def _table(self, sequence_id: int) -> Table:
        self._require_open()
        table = self._find(sequence_id)
        if table is None:
            raise ValueError(f"KV sequence {sequence_id} holds no table: it was never acquired, or is released")
        return table

    def _start(self, sequence_id: int, table: Table) -> None:
        self._require_open()
        if self._find(sequence_id) is not None:
            raise ValueError(f"KV sequence {sequence_id} has a table already")
        self._tables[sequence_id] = table

    def _refuse(self, sequence_id: int, num_tokens: int, needed: int, evict: bool) -> None:
        raise KVExhausted(
            f"KV sequence {sequence_id}: {num_tokens} tokens need {needed} more blocks of {self._block_size}; "
            f"{self.free_blocks(evict)} are free, one sequence may hold {self._max_blocks}"
        )

    def _needs_copy(self, block: int, offset: int, num_new: int, evict: bool = True) -> bool:
        """Whether a write at `offset` of the block, beside num_new new blocks, must go to a copy of it."""
        return self._num_holders(block) > 1

    def _make_room(self, num_blocks: int) -> None:
        """Called before that many blocks are taken, of those that free_blocks counts. Here they are free already."""

    def _num_holders(self, block: int) -> int:
        return self._shares.get(block) or self._books.shares.get(block, 1)

    def _take(self) -> int:
        if self._num_taken < len(self._books.free):
            self._num_taken += 1
            return self._books.free[-self._num_taken]
        return self._returned.pop()

    def _take_copy(self, block: int) -> int:
        # The block may be a copy that this transaction still owes: its content is then that of its own source.
        target = self._take()
        self._sources[target] = self._sources.get(block, block)
        self._drop(block)
        return target

    def _drop(self, block: int) -> None:
        holders = self._num_holders(block)
        if holders > 1:
            self._shares[block] = holders - 1
            return
        self._sources.pop(block, None)
        self._returned.append(block)
