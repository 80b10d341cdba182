"""The books of several pools: which sequence holds which blocks of each, and what it gave back. Knows no budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from pluglm.kv.books import Books
from pluglm.kv.pool_kinds import PoolKind


@dataclass(frozen=True, slots=True)
class Extent:
    """num_tokens: what a sequence was extended to. num_computed: what it was advanced to, None before the first time.

    Together they say what each pool has dropped, so that is stored nowhere.
    """

    num_tokens: int = 0
    num_computed: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """first_block: its number in the layout. A table's tokens are those behind what its sequence dropped here."""

    kind: PoolKind
    first_block: int
    books: Books


@dataclass(slots=True)
class Pools:
    """Written by a committed transaction. extents: of every sequence that has a table in each pool."""

    pools: tuple[Pool, ...]
    max_tokens: int  # of one sequence
    extents: dict[int, Extent] = field(default_factory=dict)

    def audit(self) -> None:
        """The books of each pool, and every table against its sequence's extent. Raises RuntimeError."""
        for pool in self.pools:
            pool.books.audit(pool.kind.block_size)
            if odd := sorted(pool.books.tables.keys() ^ self.extents.keys()):
                raise RuntimeError(f"KV books: sequence {odd[0]} has a table in some pools only")
            for sequence_id, table in pool.books.tables.items():
                _audit_table(sequence_id, self.extents[sequence_id], table.num_tokens, pool.kind)


def _audit_table(sequence_id: int, extent: Extent, num_tokens: int, kind: PoolKind) -> None:
    """Room for all that was promised, or for a span of it."""
    most = extent.num_tokens - kind.num_dropped(extent.num_computed)
    is_spanned = extent.num_computed is not None and kind.span_blocks is not None
    least = min(most, (kind.span_blocks or 0) * kind.block_size) if is_spanned else most
    if not max(0, least) <= num_tokens <= max(0, most):
        raise RuntimeError(
            f"KV books: sequence {sequence_id} has room for {num_tokens} tokens in {kind}, not for {least} to {most}"
        )
