"""What the KV managers share: one open transaction over the books, and the arithmetic of a budget."""

from __future__ import annotations

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kv import Capacity, KVLayout, KVManager
from pluglm.kv.books import Books
from pluglm.kv.transaction import BlockTransaction


class BlockManager(KVManager):
    """A pool of equal blocks with tables, sharing and copy on write; subclasses choose size and number of blocks."""

    def __init__(self, layout: KVLayout, max_blocks_per_sequence: int) -> None:
        self._layout = layout
        self._max_blocks = max_blocks_per_sequence
        self._books = Books.empty(layout.num_blocks)
        self._is_open = False

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def capacity(self) -> Capacity:
        num_free, num_cached = len(self._books.free), len(self._books.cached)
        total = self._layout.num_blocks
        return Capacity(
            total_blocks=total,
            free_blocks=num_free,
            held_blocks=total - num_free - num_cached,
            cached_blocks=num_cached,
        )

    def max_request_tokens(self) -> int:
        return self._max_blocks * self._layout.block_size

    def transaction(self) -> BlockTransaction:
        self._require_closed()
        transaction = self._make_transaction()
        self._is_open = True
        return transaction

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        return self._books.tables[sequence_id].blocks

    def audit(self) -> None:
        self._books.audit(self._layout.block_size)

    def _make_transaction(self) -> BlockTransaction:
        return BlockTransaction(self._books, self._layout.block_size, self._max_blocks, self._closed)

    def _require_closed(self) -> None:
        if self._is_open:
            raise RuntimeError("a KV transaction is open already: commit it or roll it back first")

    def _closed(self) -> None:
        self._is_open = False


def fitting_blocks(name: str, unit: str, wanted: int | None, default: int, block_bytes: int, kv_bytes: int) -> int:
    """The number of blocks: `wanted` if given, else `default` or what kv_bytes can hold, whichever is less.

    `unit` is the config's word for a block. Raises PluginError with the numbers when the budget is too small.
    """
    affordable = kv_bytes // block_bytes
    if affordable < (wanted or 1):
        raise PluginError(
            f"kv '{name}': {wanted or 1} {unit}(s) of {block_bytes} bytes need {(wanted or 1) * block_bytes} bytes, "
            f"the KV budget is {kv_bytes}; lower model.max_model_len or kv.num_{unit}s, or raise engine.kv_memory"
        )
    return wanted if wanted is not None else min(default, affordable)
