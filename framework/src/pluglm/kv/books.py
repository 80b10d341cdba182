"""The books of a KV manager: which sequence holds which blocks. Knows no budget, no tensor and no transaction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pluglm.kernel.quick_new import quick_new


@dataclass(frozen=True, slots=True)
class Table:
    """One sequence: its blocks in order, and the tokens that they were extended to. Replaced, never changed."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


new_table = quick_new(Table)


@dataclass(slots=True)
class Books:
    """Written by a committed transaction, and by a block cache between transactions.

    tables: by sequence id. shares: blocks in more than one table -> how many tables; all other held blocks are in one.
    free: a stack, the next block to hand out is its last entry, so a fixed history gives fixed blocks. cached: blocks
    in no table whose content a cache still knows; empty without a cache.
    """

    num_blocks: int
    tables: dict[int, Table] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, num_blocks: int) -> Books:
        """All blocks free; block 0 is handed out first."""
        return cls(num_blocks, free=list(range(num_blocks - 1, -1, -1)))

    def audit(self, block_size: int) -> None:
        """Every block is free, held or cached, never two of them; shares count the tables. Raises RuntimeError."""
        self._audit_tables(block_size)
        holders = Counter(block for table in self.tables.values() for block in table.blocks)
        counted = {block: count for block, count in holders.items() if count > 1}
        if counted != self.shares:
            raise RuntimeError(f"KV books: the tables share {counted}, the books say {self.shares}")
        free = set(self.free)
        if len(free) != len(self.free):
            raise RuntimeError("KV books: a block is in the free list twice")
        held = set(holders)
        for first, second, what in (
            (free, held, "free and held"),
            (free, self.cached, "free and cached"),
            (held, self.cached, "held and listed as cached"),
        ):
            if both := sorted(first & second):
                raise RuntimeError(f"KV books: block {both[0]} is {what}")
        if odd := sorted((held | free | self.cached) ^ set(range(self.num_blocks))):
            raise RuntimeError(f"KV books: block {odd[0]} of {self.num_blocks} is lost or does not exist")

    def _audit_tables(self, block_size: int) -> None:
        for sequence_id, table in self.tables.items():
            if len(set(table.blocks)) != len(table.blocks):
                raise RuntimeError(f"KV books: sequence {sequence_id} holds a block twice")
            if len(table.blocks) != -(-table.num_tokens // block_size):
                raise RuntimeError(
                    f"KV books: sequence {sequence_id} holds {len(table.blocks)} blocks for {table.num_tokens} tokens"
                )
