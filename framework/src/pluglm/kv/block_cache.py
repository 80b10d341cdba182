"""What a KV manager remembers of its blocks' content, so that later sequences can adopt them. Knows no tensor.

How content is found is an index's business, and what is evicted first an Eviction's; this keeps both in step with the
books. One rule holds throughout: a table that holds a known block holds the block of its parent before it. So what
follows an idle entry is idle too, and all idle blocks can be evicted, from the last one on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pluglm.kernel.core import CacheKey
from pluglm.kernel.interfaces.kv import EvictedBlock
from pluglm.kv.books import Books, Table
from pluglm.kv.eviction_order import EvictionHeap
from pluglm.kv.prefix_index import CacheEntry, PrefixIndex


@dataclass(slots=True)
class Published:
    """How far a sequence was published. entry: of its last whole block; num_tokens may reach beyond that."""

    namespace: bytes
    token_ids: Sequence[int]
    entry: CacheEntry | None = None
    num_blocks: int = 0
    num_tokens: int = 0


class BlockCache:
    """entries by block; published by sequence id. Between transactions it is changed by `publish` and `reset` alone."""

    def __init__(
        self, books: Books, block_size: int, index: PrefixIndex, heap: EvictionHeap, keeps_tails: bool
    ) -> None:
        self.index, self.heap, self.keeps_tails = index, heap, keeps_tails
        self.entries: dict[int, CacheEntry] = {}
        self.published: dict[int, Published] = {}
        self.now = 0
        self.evicted: list[EvictedBlock] | None = None  # since somebody asked last; None until somebody does
        self._books, self._block_size = books, block_size
        self._barred: set[int] = set()  # held tables before the last reset: what they compute may be out of date

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        """See the contract. ValueError when the table has fewer tokens, or the namespace has changed."""
        table = self._books.tables.get(sequence_id)
        if table is None or not 0 <= key.limit <= min(table.num_tokens, len(key.token_ids)):
            have = "no table" if table is None else f"room for {table.num_tokens} and {len(key.token_ids)} are known"
            raise ValueError(f"KV sequence {sequence_id}: {key.limit} tokens cannot be published, it has {have}")
        if sequence_id in self._barred:
            return
        state = self.published.get(sequence_id)
        if state is None:
            state = self.published[sequence_id] = Published(key.namespace, key.token_ids)
        elif state.namespace != key.namespace:
            raise ValueError(f"KV sequence {sequence_id} was published under another namespace before")
        if key.limit >= state.num_tokens:
            state.num_tokens, state.token_ids = key.limit, key.token_ids
        if key.limit // self._block_size > state.num_blocks:
            self._publish_blocks(sequence_id, table, state, key.limit // self._block_size)

    def _publish_blocks(self, sequence_id: int, table: Table, state: Published, num_blocks: int) -> None:
        """Whole blocks from where it stopped. Where another block has the content already, the table gets that one."""
        self.now += 1
        size, blocks = self._block_size, list(table.blocks)
        for number in range(state.num_blocks, num_blocks):
            block, tokens = blocks[number], tuple(state.token_ids[number * size : (number + 1) * size])
            entry = self.index.find(state.namespace, state.entry, tokens)
            if entry is None or entry.block != block:
                if not self._may_change(block, entry):
                    break
                if (start := self.entries.get(block)) is not None:
                    self.remove(start)
                if entry is None:
                    entry = self.make_entry(block, state.entry, number * size, size, start)
                    self._insert(entry, state, tokens)
                else:
                    blocks[number] = self._swap(block, entry)
            entry.used_at = self.now
            state.entry, state.num_blocks = entry, number + 1
        if tuple(blocks) != table.blocks:
            self._books.tables[sequence_id] = replace(table, blocks=tuple(blocks))

    def _may_change(self, block: int, entry: CacheEntry | None) -> bool:
        """Whether a held block may become an entry, or give way to one that has its content.

        Not while it is one of another namespace; and a fork that holds it too would keep what follows it without it.
        """
        known = self.entries.get(block)
        is_whole = known is not None and known.num_tokens == self._block_size
        return not is_whole and (entry is None or block not in self._books.shares)

    def make_entry(
        self, block: int, parent: CacheEntry | None, num_before: int, num_tokens: int, start: CacheEntry | None
    ) -> CacheEntry:
        """Not inserted yet. start: the entry that knew the beginning of the same block; its hits count on."""
        return CacheEntry(
            block=block,
            parent=parent,
            num_before=num_before,
            num_tokens=num_tokens,
            cached_at=self.now,
            used_at=self.now,
            idle_since=self.now,
            num_hits=0 if start is None else start.num_hits,
        )

    def _insert(self, entry: CacheEntry, state: Published, tokens: tuple[int, ...]) -> None:
        useless = self.index.add(state.namespace, entry.parent, tokens, entry)
        self.entries[entry.block] = entry
        if entry.parent is not None:
            entry.parent.num_followers += 1
            self.heap.discard(entry.parent)
        if useless is not None and useless.block in self._books.cached:
            self.remove(useless)
            self._books.free.append(useless.block)

    def _swap(self, block: int, entry: CacheEntry) -> int:
        """One table's block for the entry's, which has the same content."""
        books = self._books
        if entry.block in books.cached:
            self.set_idle(entry, False)
        else:
            books.shares[entry.block] = books.shares.get(entry.block, 1) + 1
        books.free.append(block)
        return entry.block

    def evict(self, entry: CacheEntry) -> None:
        """Forget a block for want of room, and note what it held."""
        if self.evicted is not None and entry.num_tokens == self._block_size:
            self.evicted.append(EvictedBlock(entry.block, *self.index.path(entry)))
        self.remove(entry)

    def remove(self, entry: CacheEntry) -> None:
        """Forget the content of a block that nothing follows; the books are told that it is not cached."""
        self.index.remove(entry)
        del self.entries[entry.block]
        self.heap.discard(entry)
        self._books.cached.discard(entry.block)
        if (parent := entry.parent) is not None:
            parent.num_followers -= 1
            if not parent.num_followers and parent.block in self._books.cached:
                self.heap.add(parent)

    def set_idle(self, entry: CacheEntry, is_idle: bool) -> None:
        """No table holds its block from now on, or one does again."""
        if not is_idle:
            self._books.cached.discard(entry.block)
            self.heap.discard(entry)
            return
        self._books.cached.add(entry.block)
        entry.idle_since = self.now
        if not entry.num_followers:
            self.heap.add(entry)

    def keep_tail(self, entry: CacheEntry, state: Published) -> None:
        """The partly filled last block of a released sequence, in no table; free if its content is known already."""
        tokens = tuple(state.token_ids[entry.num_before : entry.num_before + entry.num_tokens])
        if self.index.find(state.namespace, entry.parent, tokens) is not None:
            self._books.free.append(entry.block)
        else:
            self._insert(entry, state, tokens)
            self.set_idle(entry, True)

    def adopted(self, sequence_id: int, key: CacheKey, entries: Sequence[CacheEntry], num_tokens: int) -> None:
        """A sequence began with these: the whole ones count as published by it."""
        for entry in entries:
            entry.num_hits += 1
            entry.used_at = self.now
        num_blocks = num_tokens // self._block_size
        last = entries[num_blocks - 1] if num_blocks else None
        whole = num_blocks * self._block_size
        self.published[sequence_id] = Published(key.namespace, key.token_ids, last, num_blocks, whole)

    def forked(self, parent_id: int, child_id: int) -> None:
        if parent_id in self._barred:
            self._barred.add(child_id)

    def trimmed(self, sequence_id: int, num_tokens: int) -> None:
        """What was published beyond stays cached, and is no longer this sequence's."""
        state = self.published.get(sequence_id)
        if state is None:
            return
        state.num_tokens = min(state.num_tokens, num_tokens)
        while state.num_blocks > num_tokens // self._block_size and state.entry is not None:
            state.entry, state.num_blocks = state.entry.parent, state.num_blocks - 1

    def released(self, sequence_id: int) -> None:
        self.published.pop(sequence_id, None)
        self._barred.discard(sequence_id)

    def reset(self) -> None:
        """See the contract. What live sequences hold is not published any more either."""
        for entry in sorted(self.entries.values(), key=lambda entry: entry.num_before, reverse=True):
            if entry.block in self._books.cached:
                self._books.free.append(entry.block)
            self.remove(entry)
        self.evicted = None if self.evicted is None else []
        self.published.clear()
        self._barred.update(self._books.tables)

    def audit(self) -> None:
        """RuntimeError unless books, entries, heap and index agree."""
        held = {block for table in self._books.tables.values() for block in table.blocks}
        if odd := self._books.cached ^ (self.entries.keys() - held):
            raise RuntimeError(f"KV cache: block {min(odd)} is cached in the books alone, or known and in no class")
        followers = Counter(entry.parent.block for entry in self.entries.values() if entry.parent is not None)
        for block, entry in self.entries.items():
            parent = entry.parent
            if entry.block != block or (parent is not None and self.entries.get(parent.block) is not parent):
                raise RuntimeError(f"KV cache: the entry of block {block} is another's, or its parent is gone")
            if entry.num_followers != followers[block]:
                raise RuntimeError(f"KV cache: {followers[block]} entries follow block {block}: {entry.num_followers}")
            if (block in self._books.cached and not entry.num_followers) != self.heap.has(entry):
                raise RuntimeError(f"KV cache: block {block} can be evicted and is not in the heap, or the reverse")
        for sequence_id, table in self._books.tables.items():
            self._audit_table(sequence_id, table)
        self.index.audit(self.entries.values())

    def _audit_table(self, sequence_id: int, table: Table) -> None:
        """Known blocks are where they belong, each after its parent's; the last one published is the table's own."""
        state = self.published.get(sequence_id)
        last = None if state is None or state.entry is None else (state.num_blocks - 1, state.entry)
        for number, block in enumerate(table.blocks):
            entry = self.entries.get(block)
            if last is not None and last[0] == number and last[1] is not entry:
                raise RuntimeError(f"KV cache: sequence {sequence_id} was published with another block than {block}")
            if entry is None:
                continue
            parent = None if entry.parent is None else entry.parent.block
            if entry.num_before != number * self._block_size or parent != (
                table.blocks[number - 1] if number else None
            ):
                raise RuntimeError(f"KV cache: sequence {sequence_id} holds block {block} without its parent")
