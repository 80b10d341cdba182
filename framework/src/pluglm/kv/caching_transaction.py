"""A transaction over books with a block cache: adoption, eviction and the last blocks of what is released."""

from __future__ import annotations

from collections.abc import Callable

from pluglm.kernel.core import CacheKey
from pluglm.kv.block_cache import BlockCache, Published
from pluglm.kv.books import Books, Table
from pluglm.kv.eviction_order import EvictionOrder
from pluglm.kv.prefix_index import CacheEntry
from pluglm.kv.transaction import BlockTransaction


class CachingTransaction(BlockTransaction):
    """Blocks whose content is known become idle instead of free when their last holder drops them.

    Like the books, the cache changes in `commit` alone. Until then its entries are as committed, and what differs is
    kept here: which became idle or held, which were evicted, and how many followers each has lost by that.
    """

    def __init__(
        self, books: Books, block_size: int, max_blocks: int, close: Callable[[], None], cache: BlockCache
    ) -> None:
        super().__init__(books, block_size, max_blocks, close)
        self._cache = cache
        self._num_idle = len(books.cached)
        self._idle: dict[int, bool] = {}
        self._evicted: dict[int, CacheEntry] = {}
        self._lost: dict[CacheEntry, int] = {}
        self._order: EvictionOrder | None = None
        self._candidates: list[CacheEntry] = []  # may have become evictable, and are not in the order yet
        self._tails: dict[int, tuple[CacheEntry, Published]] = {}  # entries to be made of what was released
        self._adopted: dict[int, tuple[CacheKey, list[CacheEntry], int]] = {}
        self._trimmed: dict[int, int] = {}
        self._forked: dict[int, int] = {}  # child -> the committed sequence that it comes from
        self._released: set[int] = set()  # committed ones

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        """Adopts without taking a block: one that is adopted in part is copied when the sequence is extended."""
        if key is None:
            return super().acquire(sequence_id)
        entries, num_tokens = self._cache.index.match(key, self._evicted)
        self._start(sequence_id, Table(tuple(entry.block for entry in entries), num_tokens))
        for entry in entries:
            if self._is_idle(entry.block):
                self._set_idle(entry.block, False)
            else:
                self._shares[entry.block] = self._num_holders(entry.block) + 1
        self._adopted[sequence_id] = key, entries, num_tokens
        return num_tokens

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        super().trim(sequence_id, num_tokens)
        self._trimmed[sequence_id] = min(num_tokens, self._trimmed.get(sequence_id, num_tokens))

    def fork(self, parent_id: int, child_id: int) -> None:
        super().fork(parent_id, child_id)
        self._forked[child_id] = self._forked.get(parent_id, parent_id)

    def release(self, sequence_id: int) -> None:
        table = self._table(sequence_id)
        if sequence_id in self._books.tables and sequence_id not in self._released:
            self._keep_tail(sequence_id, table)
            self._released.add(sequence_id)
        super().release(sequence_id)
        for record in (self._adopted, self._trimmed, self._forked):
            record.pop(sequence_id, None)

    def free_blocks(self, evict: bool = True) -> int:
        return super().free_blocks() + (self._num_idle if evict else 0)

    def _apply(self) -> None:
        super()._apply()
        cache = self._cache
        cache.now += 1
        for entry in self._evicted.values():
            cache.evict(entry)
        for block, is_idle in self._idle.items():
            known = cache.entries.get(block)
            if known is not None and is_idle != (block in self._books.cached):
                cache.set_idle(known, is_idle)
        for child_id, parent_id in self._forked.items():
            cache.forked(parent_id, child_id)
        for sequence_id in self._released:
            cache.released(sequence_id)
        for entry, state in self._tails.values():
            cache.keep_tail(entry, state)
        for sequence_id, adoption in self._adopted.items():
            cache.adopted(sequence_id, *adoption)
        for sequence_id, num_tokens in self._trimmed.items():
            cache.trimmed(sequence_id, num_tokens)
        cache.heap.compact(len(cache.entries))

    def _entry(self, block: int) -> CacheEntry | None:
        if block in self._tails:
            return self._tails[block][0]
        return None if block in self._evicted else self._cache.entries.get(block)

    def _is_idle(self, block: int) -> bool:
        return self._idle.get(block, block in self._books.cached)

    def _set_idle(self, block: int, is_idle: bool) -> None:
        self._idle[block] = is_idle
        self._num_idle += 1 if is_idle else -1

    def _drop(self, block: int) -> None:
        entry = self._entry(block) if self._num_holders(block) == 1 else None
        if entry is None:
            super()._drop(block)
        else:
            self._set_idle(block, True)
            self._candidates.append(entry)

    def _keep_tail(self, sequence_id: int, table: Table) -> None:
        """What was published beyond the whole blocks of a sequence, if nobody else holds that block."""
        state, size = self._cache.published.get(sequence_id), self._block_size
        if state is None or not self._cache.keeps_tails:
            return
        number, num_tokens = divmod(state.num_tokens, size)
        trimmed = self._trimmed.get(sequence_id, state.num_tokens) < state.num_tokens
        if trimmed or not num_tokens or number != state.num_blocks:
            return
        block = table.blocks[number]
        if block != self._books.tables[sequence_id].blocks[number]:
            return  # a copy that was never filled
        known = self._entry(block)  # the beginning of it, if that was adopted
        if self._num_holders(block) > 1 or (known is not None and known.num_tokens >= num_tokens):
            return
        if known is not None:
            self._evict(known)
        self._tails[block] = self._cache.make_entry(block, state.entry, number * size, num_tokens, known), state
        self._count_lost(state.entry, -1)

    def _needs_copy(self, block: int, offset: int, num_new: int, evict: bool = True) -> bool:
        """Also where the write would change what the cache knows. Without a block for the copy, it knows it no more."""
        if super()._needs_copy(block, offset, num_new, evict):
            return True
        entry = self._entry(block)
        if entry is None or entry.num_tokens <= offset:
            return False
        if not evict or num_new != self.free_blocks():
            return True
        self._make_room(num_new)  # evicts everything, so nothing follows the block any more
        self._evict(entry)
        return False

    def _make_room(self, num_blocks: int) -> None:
        for _ in range(num_blocks - super().free_blocks()):
            entry = self._next_to_go()
            self._set_idle(entry.block, False)
            self._evict(entry)
            self._returned.append(entry.block)

    def _next_to_go(self) -> CacheEntry:
        if self._order is None:
            self._order = EvictionOrder(self._cache.heap)
        while self._candidates:
            entry = self._candidates[-1]
            if self._may_go(entry):
                is_new = self._idle.get(entry.block, False)
                self._order.add(entry, self._cache.now + 1 if is_new else entry.idle_since)
            self._candidates.pop()
        while not self._may_go(entry := self._order.pop()):
            pass
        return entry

    def _may_go(self, entry: CacheEntry) -> bool:
        return entry.num_followers == self._lost.get(entry, 0) and self._is_idle(entry.block)

    def _evict(self, entry: CacheEntry) -> None:
        if self._tails.pop(entry.block, None) is None:
            self._evicted[entry.block] = entry
        self._count_lost(entry.parent, 1)
        if entry.parent is not None:
            self._candidates.append(entry.parent)

    def _count_lost(self, entry: CacheEntry | None, count: int) -> None:
        if entry is not None:
            self._lost[entry] = self._lost.get(entry, 0) + count
