"""One step's changes over several pools, all or nothing: what an operation asks of all of them. Knows no block."""

from __future__ import annotations

from collections.abc import Callable

from pluglm.kernel.core import BlockCopies, CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kv.pool_transaction import PoolTransaction
from pluglm.kv.pools import Extent, Pools
from pluglm.kv.transaction import Closing


class PooledTransaction(Closing):
    """The GroupTransaction of a manager with pools, made of a part for each.

    Every operation first asks whether it can be done in all parts, then does it; so none has anything to undo.
    """

    def __init__(self, pools: Pools, close: Callable[[], None]) -> None:
        super().__init__(close)
        self._pools = pools
        self._parts = [PoolTransaction(pool) for pool in pools.pools]
        self._kinds = [pool.kind for pool in pools.pools]
        self._extents: dict[int, Extent | None] = {}  # what differs from the books; None is released

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        """Empty tables, whatever the key: nothing is cached here."""
        self._require_open()
        for part in self._parts:
            part.acquire(sequence_id)
        self._extents[sequence_id] = Extent()
        return 0

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        extent = self._extent(sequence_id)
        if num_tokens > extent.num_tokens:
            self._fill(sequence_id, Extent(num_tokens, extent.num_computed))

    def advance(self, sequence_id: int, num_computed: int) -> None:
        extent = self._extent(sequence_id)
        if extent.num_tokens and not 0 <= num_computed <= extent.num_tokens:
            raise ValueError(
                f"KV sequence {sequence_id}: {num_computed} of {extent.num_tokens} tokens are not computed"
            )
        self._require_kept(sequence_id, num_computed)
        new = Extent(extent.num_tokens, num_computed)
        self._extents[sequence_id] = new
        dropped = [kind.num_dropped(num_computed) - kind.num_dropped(extent.num_computed) for kind in self._kinds]
        if extent.num_tokens and any(dropped):
            for part, num_tokens in zip(self._parts, dropped, strict=True):
                part.drop_first(sequence_id, num_tokens)
            self._fill(sequence_id, new)  # with no more than was dropped

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"KV sequence {sequence_id} cannot be trimmed to {num_tokens} tokens")
        extent = self._extent(sequence_id)
        if num_tokens >= extent.num_tokens:
            return
        self._require_kept(sequence_id, num_tokens)
        for part, kind in zip(self._parts, self._kinds, strict=True):
            part.trim(sequence_id, num_tokens - kind.num_dropped(extent.num_computed))
        num_computed = None if extent.num_computed is None else min(extent.num_computed, num_tokens)
        self._extents[sequence_id] = Extent(num_tokens, num_computed)

    def fork(self, parent_id: int, child_id: int) -> None:
        """ValueError, too, when the parent has tokens without a block, which cannot be written yet."""
        extent = self._extent(parent_id)
        if not all(part.has_room(parent_id, extent) for part in self._parts):
            raise ValueError(
                f"KV sequence {parent_id} has computed {extent.num_computed} of {extent.num_tokens} tokens: "
                f"fork it when all are written, or trim it first"
            )
        for part in self._parts:
            part.fork(parent_id, child_id)
        self._extents[child_id] = extent

    def release(self, sequence_id: int) -> None:
        self._extent(sequence_id)
        for part in self._parts:
            part.release(sequence_id)
        self._extents[sequence_id] = None

    def free_blocks(self, evict: bool = True) -> int:
        """Of the pool that has the fewest: a new sequence takes a block of each."""
        self._require_open()
        return min(part.free_blocks() for part in self._parts)

    def commit(self) -> BlockCopies:
        self._require_open()
        copies = [(part.first_block, pair) for part in self._parts for pair in part.commit()]
        for sequence_id, extent in self._extents.items():
            if extent is None:
                self._pools.extents.pop(sequence_id, None)
            else:
                self._pools.extents[sequence_id] = extent
        self._end()
        return tuple((first + source, first + target) for first, (source, target) in copies)

    def rollback(self) -> None:
        self._require_open()
        for part in self._parts:
            part.rollback()
        self._end()

    def _extent(self, sequence_id: int) -> Extent:
        self._require_open()
        is_changed = sequence_id in self._extents
        extent = self._extents[sequence_id] if is_changed else self._pools.extents.get(sequence_id)
        if extent is None:
            raise ValueError(f"KV sequence {sequence_id} holds no table: it was never acquired, or is released")
        return extent

    def _require_kept(self, sequence_id: int, num_tokens: int) -> None:
        """ValueError when a query at position num_tokens sees what was given back."""
        num_computed = self._extent(sequence_id).num_computed
        for kind in self._kinds:
            if kind.num_dropped(num_tokens) < kind.num_dropped(num_computed):
                raise ValueError(
                    f"KV sequence {sequence_id} cannot go back from {num_computed} computed tokens to {num_tokens}: "
                    f"its {kind} gave back what is seen there"
                )

    def _fill(self, sequence_id: int, extent: Extent) -> None:
        """Blocks for the extent in every pool, or KVExhausted and none in any."""
        needs = [part.need(sequence_id, extent) for part in self._parts]
        for part, (_, num_missing) in zip(self._parts, needs, strict=True):
            if num_missing:
                raise KVExhausted(
                    f"KV sequence {sequence_id}: {extent.num_tokens} tokens need {num_missing} more blocks of "
                    f"{part.kind.block_size} than the {part.free_blocks()} that are free for {part.kind}"
                )
        if extent.num_tokens > self._pools.max_tokens:
            raise KVExhausted(
                f"KV sequence {sequence_id}: {extent.num_tokens} tokens, one sequence may hold {self._pools.max_tokens}"
            )
        for part, (size, _) in zip(self._parts, needs, strict=True):
            part.extend(sequence_id, size)
        self._extents[sequence_id] = extent
