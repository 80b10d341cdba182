"""One step's changes to the books of a KV manager, kept aside until commit. Knows blocks, never what they contain."""

from __future__ import annotations

from collections.abc import Callable

from pluglm.kernel.core import BlockCopies
from pluglm.kernel.errors import KVExhausted
from pluglm.kv.books import Books, Table


class BlockTransaction:
    """The KVTransaction of every manager here. The books change in `commit` alone, so rollback has nothing to undo.

    Copy on write: the manager never sees a write, but tokens are only written after the `extend` that covers them.
    So `extend` replaces every shared block that holds a position between the old and the new size, whichever holder
    extends first; the last holder keeps the original. To rewrite tokens, `trim` to them before extending again; and
    fork a sequence only when its tokens are written, since copies are made before the step writes.
    """

    def __init__(self, books: Books, block_size: int, max_blocks: int, close: Callable[[], None]) -> None:
        self._books = books
        self._block_size = block_size
        self._max_blocks = max_blocks  # of one sequence
        self._close = close
        self._tables: dict[int, Table | None] = {}  # what differs from the books; None is released
        self._shares: dict[int, int] = {}
        self._num_taken = 0  # from the end of books.free
        self._returned: list[int] = []
        self._sources: dict[int, int] = {}  # block to be filled -> block whose present content it gets
        self._is_open = True

    def acquire(self, sequence_id: int) -> None:
        self._require_open()
        if self._find(sequence_id) is not None:
            raise ValueError(f"KV sequence {sequence_id} has a table already")
        self._tables[sequence_id] = Table()

    def extend(self, sequence_id: int, num_tokens: int) -> None:
        table = self._table(sequence_id)
        if num_tokens <= table.num_tokens:
            return
        num_blocks = -(-num_tokens // self._block_size)
        first_written = table.num_tokens // self._block_size
        shared = [i for i in range(first_written, len(table.blocks)) if self._num_holders(table.blocks[i]) > 1]
        needed = num_blocks - len(table.blocks) + len(shared)
        if num_blocks > self._max_blocks or needed > self.free_blocks():
            raise KVExhausted(
                f"KV sequence {sequence_id}: {num_tokens} tokens need {needed} more blocks of {self._block_size}; "
                f"{self.free_blocks()} are free, one sequence may hold {self._max_blocks}"
            )
        self._tables[sequence_id] = Table(self._grown(table.blocks, shared, num_blocks), num_tokens)

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
        if self._find(child_id) is not None:
            raise ValueError(f"KV sequence {child_id} has a table already")
        for block in table.blocks:
            self._shares[block] = self._num_holders(block) + 1
        self._tables[child_id] = table

    def release(self, sequence_id: int) -> None:
        table = self._table(sequence_id)
        self._tables[sequence_id] = None
        for block in reversed(table.blocks):
            self._drop(block)

    def free_blocks(self) -> int:
        self._require_open()
        return len(self._books.free) - self._num_taken + len(self._returned)

    def commit(self) -> BlockCopies:
        self._require_open()
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
        self._end()
        return tuple((source, target) for target, source in self._sources.items())

    def rollback(self) -> None:
        self._require_open()
        self._end()

    def _end(self) -> None:
        self._is_open = False
        self._close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the KV transaction is closed; open a new one with transaction()")

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

    def _grown(self, blocks: tuple[int, ...], shared: list[int], num_blocks: int) -> tuple[int, ...]:
        if not shared and num_blocks == len(blocks):
            return blocks
        grown = list(blocks)
        for i in shared:
            grown[i] = self._take_copy(grown[i])
        grown += [self._take() for _ in range(num_blocks - len(grown))]
        return tuple(grown)

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
