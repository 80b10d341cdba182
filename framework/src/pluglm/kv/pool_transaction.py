"""The part of a transaction that is about one pool. Knows the rule of a window, and nothing of the other pools."""

from __future__ import annotations

from pluglm.kv.books import Table
from pluglm.kv.pools import Extent, Pool
from pluglm.kv.transaction import BlockTransaction


class PoolTransaction(BlockTransaction):
    """Sizes are tokens behind those that were dropped."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.books, pool.kind.block_size, pool.books.num_blocks, close=lambda: None)
        self.kind, self.first_block = pool.kind, pool.first_block

    def need(self, sequence_id: int, extent: Extent) -> tuple[int, int]:
        """Tokens that the table must have room for, and how many blocks too few are free for that."""
        table = self._table(sequence_id)
        size = self.wanted(table, extent)
        if size <= table.num_tokens:
            return size, 0
        num_new = -(-size // self._block_size) - len(table.blocks)
        offset = table.num_tokens % self._block_size
        is_copied = offset > 0 and self._needs_copy(table.blocks[-1], offset, num_new)
        return size, max(0, num_new + is_copied - self.free_blocks()) if num_new or is_copied else 0

    def wanted(self, table: Table, extent: Extent) -> int:
        """A sequence that is advanced has one span, and gets as many blocks at its end as it drops at its start.

        For that they must be its own, so one that shares blocks has room for all its tokens at once.
        """
        num_tokens = extent.num_tokens - self.kind.num_dropped(extent.num_computed)
        if extent.num_computed is None or self.kind.span_blocks is None:
            return num_tokens
        span = self.kind.span_blocks * self._block_size
        if num_tokens > span and any(self._num_holders(block) > 1 for block in table.blocks):
            return num_tokens
        return min(num_tokens, span)

    def has_room(self, sequence_id: int, extent: Extent) -> bool:
        """Whether every token of the extent has a block."""
        return self._table(sequence_id).num_tokens >= extent.num_tokens - self.kind.num_dropped(extent.num_computed)

    def drop_first(self, sequence_id: int, num_tokens: int) -> None:
        """Give back the blocks of the first num_tokens, a multiple of the block size."""
        table, num_blocks = self._table(sequence_id), num_tokens // self._block_size
        self._tables[sequence_id] = Table(table.blocks[num_blocks:], max(0, table.num_tokens - num_tokens))
        for block in table.blocks[:num_blocks]:
            self._drop(block)
