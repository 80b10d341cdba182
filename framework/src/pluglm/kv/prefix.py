"""A paged KV manager that reuses prefixes; subclasses bring the index that finds them. Knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluglm.kernel.config import Slot
from pluglm.kernel.core import CacheKey
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import EvictedBlock
from pluglm.kv.block_cache import BlockCache
from pluglm.kv.caching_transaction import CachingTransaction
from pluglm.kv.eviction_order import EvictionHeap
from pluglm.kv.paged import PagedKV, PagedKVConfig
from pluglm.kv.prefix_index import PrefixIndex


class PrefixKVConfig(PagedKVConfig):
    """eviction: which cached blocks go first when room is needed, a name or {use: NAME, ...its own keys}."""

    eviction: Slot = Slot(use="lru")


class PrefixKV(PagedKV):
    """The paged manager with a PrefixCache. keeps_tails: whether the index also finds partly filled last blocks."""

    Config = PrefixKVConfig

    def __init__(
        self, config: PrefixKVConfig, context: BuildContext, name: str, index: PrefixIndex, keeps_tails: bool
    ) -> None:
        super().__init__(config, context, name)
        slot = config.eviction
        eviction_class, eviction_config = context.resolve_component("eviction", slot.use, slot.options)
        heap = EvictionHeap(slot.use, eviction_class(eviction_config, context))
        self._cache = BlockCache(self._books, self._layout.block_size, index, heap, keeps_tails)

    @classmethod
    def uses(cls, config: PrefixKVConfig) -> list[tuple[str, str, Mapping[str, Any]]]:
        return [("eviction", config.eviction.use, config.eviction.options)]

    def probe(self, key: CacheKey) -> int:
        return self._cache.index.match(key, ())[1]

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        self._require_closed()
        self._cache.publish(sequence_id, key)

    def reset(self) -> None:
        self._require_closed()
        self._cache.reset()

    def take_evicted(self) -> list[EvictedBlock]:
        taken, self._cache.evicted = self._cache.evicted or [], []
        return taken

    def audit(self) -> None:
        super().audit()
        self._cache.audit()

    def _make_transaction(self) -> CachingTransaction:
        return CachingTransaction(self._books, self._layout.block_size, self._max_blocks, self._closed, self._cache)
