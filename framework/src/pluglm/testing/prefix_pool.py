"""A plain prefix-caching KV manager beside the fast ones: whole blocks, no eviction seam. Slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pluglm.kernel.core import CacheKey
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import Capacity
from pluglm.testing.block_kv import BlockKV, BlockKVConfig, BlockTransaction, Book

Prefix = tuple[bytes, tuple[int, ...]]  # namespace, all tokens from the first to the end of the block


@dataclass(slots=True)
class PrefixBook(Book):
    """known: block -> whose KV it holds. barred: sequences that held a table at the last reset, and their forks."""

    known: dict[int, Prefix] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    def copy(self) -> PrefixBook:
        tables = {one: list(table) for one, table in self.tables.items()}
        return PrefixBook(tables, dict(self.sizes), dict(self.known), set(self.barred))

    def cached(self) -> list[int]:
        """Known and held by nobody; the longest prefixes first, so that nothing goes before what follows it."""
        idle = self.known.keys() - self.holders().keys()
        return sorted(idle, key=lambda block: (-len(self.known[block][1]), block))

    def match(self, key: CacheKey, block_size: int) -> list[int]:
        blocks = {prefix: block for block, prefix in self.known.items()}
        found: list[int] = []
        for end in range(block_size, min(key.limit, len(key.token_ids)) + 1, block_size):
            prefix = (key.namespace, tuple(key.token_ids[:end]))
            if prefix not in blocks:
                break
            found.append(blocks[prefix])
        return found


class PrefixTransaction(BlockTransaction):
    """Free blocks are taken first; one that is taken, or written to by its only holder, is known no more."""

    manager: PrefixPool
    book: PrefixBook
    may_evict = True

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        super().acquire(sequence_id)
        if key is None:
            return 0
        self.book.tables[sequence_id] = self.book.match(key, self.manager.block_size)
        self.book.sizes[sequence_id] = len(self.book.tables[sequence_id]) * self.manager.block_size
        return self.book.sizes[sequence_id]

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        size, self.may_evict = self.book.sizes[sequence_id], evict
        try:
            super().extend(sequence_id, num_tokens)
        finally:
            self.may_evict = True
        if num_tokens > size:
            for block in self.book.tables[sequence_id][size // self.manager.block_size :]:
                self.book.known.pop(block, None)

    def fork(self, parent_id: int, child_id: int) -> None:
        super().fork(parent_id, child_id)
        if parent_id in self.book.barred:
            self.book.barred.add(child_id)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.book.barred.discard(sequence_id)

    def free_list(self) -> list[int]:
        return [*self._unknown(), *(self.book.cached() if self.may_evict else [])]

    def _unknown(self) -> list[int]:
        return [block for block in super().free_list() if block not in self.book.known]

    def free_blocks(self, evict: bool = True) -> int:
        return len(self.free_list() if evict else self._unknown())


class PrefixPool(BlockKV):
    """BlockKV with a PrefixCache of whole blocks. Of equal blocks the first one published is known."""

    Transaction: ClassVar[type[BlockTransaction]] = PrefixTransaction
    book: PrefixBook

    def __init__(self, config: BlockKVConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.book = PrefixBook()

    def capacity(self) -> Capacity:
        held, cached = len(self.book.holders()), len(self.book.cached())
        free = self.num_blocks - held - cached
        return Capacity(total_blocks=self.num_blocks, free_blocks=free, held_blocks=held, cached_blocks=cached)

    def probe(self, key: CacheKey) -> int:
        return len(self.book.match(key, self.block_size)) * self.block_size

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        self._require_closed()
        if key.limit > self.book.sizes.get(sequence_id, -1):
            raise ValueError(f"sequence {sequence_id} has no {key.limit} tokens")
        if sequence_id in self.book.barred:
            return
        for number in range(key.limit // self.block_size):
            block = self.book.tables[sequence_id][number]
            prefix = (key.namespace, tuple(key.token_ids[: (number + 1) * self.block_size]))
            if prefix not in self.book.known.values():
                self.book.known.setdefault(block, prefix)

    def reset(self) -> None:
        self._require_closed()
        self.book.known.clear()
        self.book.barred.update(self.book.tables)

    def _require_closed(self) -> None:
        if self.is_open:
            raise RuntimeError("a KV transaction is open")
