"""The paged KV manager with a pool for each window of the model, which keeps what the window needs. Knows no tensor."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pydantic import Field

from pluglm.kernel.interfaces.component import LAYER_GROUPS, BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import Capacity, GroupTable, KVLayout, KVManager
from pluglm.kv.books import Books
from pluglm.kv.group_transaction import PooledTransaction
from pluglm.kv.pool_kinds import make_groups, pool_kinds
from pluglm.kv.pools import Pool, Pools


class WindowPagedKVConfig(ComponentConfig):
    """block_size: tokens of a block.

    num_blocks: of the pool for layers without a window, and the most of any other; None fills the KV budget, up to what
    the seats could ever use. num_windows: sequences that the pools for windows are made for, None for the number of
    seats; paused requests and the lanes of a search keep a window each without a seat.
    """

    block_size: int = Field(default=16, ge=1)
    num_blocks: int | None = Field(default=None, ge=1)
    num_windows: int | None = Field(default=None, ge=1)


class WindowPagedKV(KVManager):
    """KV memory in small blocks, one pool for all layers of one window: what a window has left behind serves others.

    Between steps a layer with a window keeps the window of a sequence and less than one unit more, a unit being the
    least common multiple of the block size and 64 tokens; while a long prompt is read, a step's tokens as well. For a
    model without windows it is the paged manager. It reuses no prefixes.
    """

    interface_version = 2
    Config = WindowPagedKVConfig

    def __init__(self, config: WindowPagedKVConfig, context: BuildContext) -> None:
        size, kinds = config.block_size, pool_kinds(context, config.block_size)
        num_windows = config.num_windows or context.max_num_seqs
        groups = make_groups("window_paged", kinds, context, config.num_blocks, num_windows)
        counts = [group.num_blocks for group in groups]
        firsts = accumulate(counts, initial=0)
        pools = [Pool(*one) for one in zip(kinds, firsts, map(Books.empty, counts), strict=False)]
        # A pool that holds a span holds a sequence of any length.
        limits = [
            count * size
            for count, kind in zip(counts, kinds, strict=True)
            if kind.span_blocks is None or count < kind.span_blocks
        ]
        self._pools = Pools(tuple(pools), min(limits, default=context.max_model_len))
        has_windows = any(kind.window is not None for kind in kinds)
        self._layout = KVLayout(num_blocks=sum(counts), block_size=size, groups=groups if has_windows else ())
        self._is_open = False

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(needs={LAYER_GROUPS: "its layers keep different tokens; use kv 'paged'"})

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def capacity(self) -> Capacity:
        """Over all pools."""
        total, free = self._layout.num_blocks, sum(len(pool.books.free) for pool in self._pools.pools)
        return Capacity(total_blocks=total, free_blocks=free, held_blocks=total - free)

    def max_request_tokens(self) -> int:
        return self._pools.max_tokens

    def transaction(self) -> PooledTransaction:
        if self._is_open:
            raise RuntimeError("a KV transaction is open already: commit it or roll it back first")
        transaction = PooledTransaction(self._pools, self._closed)
        self._is_open = True
        return transaction

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        pools = self._pools.pools
        return tuple(pool.first_block + block for pool in pools for block in pool.books.tables[sequence_id].blocks)

    def group_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        num_computed = self._pools.extents[sequence_id].num_computed
        return tuple(
            GroupTable(pool.kind.num_dropped(num_computed), pool.books.tables[sequence_id].blocks)
            for pool in self._pools.pools
        )

    def audit(self) -> None:
        self._pools.audit()

    def _closed(self) -> None:
        self._is_open = False
