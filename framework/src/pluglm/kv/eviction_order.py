"""Which cached blocks go first: those that no other one follows, by the rank that an Eviction gives them."""

from __future__ import annotations

import heapq
import itertools

from pluglm.kernel.errors import ComponentFailure, describe
from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction
from pluglm.kv.prefix_index import CacheEntry

Item = tuple[tuple[float, ...], int, int, CacheEntry]  # rank, block, a number that no other item has, the entry


class EvictionHeap:
    """The entries that could be evicted now. Ranks are asked for when room is needed, not before.

    An item is stale once its entry has another rank or none; stale items go when they come to the top, or when they
    are most of the heap.
    """

    def __init__(self, name: str, eviction: Eviction) -> None:
        self._name, self._eviction = name, eviction
        self._unranked: dict[int, CacheEntry] = {}
        self._numbers = itertools.count()
        self.items: list[Item] = []

    def add(self, entry: CacheEntry) -> None:
        entry.rank = None
        self._unranked[entry.block] = entry

    def discard(self, entry: CacheEntry) -> None:
        entry.rank = None
        self._unranked.pop(entry.block, None)

    def has(self, entry: CacheEntry) -> bool:
        return entry.rank is not None or self._unranked.get(entry.block) is entry

    def settle(self) -> None:
        """Rank what is new. ComponentFailure when the eviction breaks its contract; nothing is lost then."""
        while self._unranked:
            block, entry = next(reversed(self._unranked.items()))
            item = self.ranked(entry, entry.idle_since)
            entry.rank = item[0]
            heapq.heappush(self.items, item)
            del self._unranked[block]
        while self.items and _is_stale(self.items[0]):
            heapq.heappop(self.items)

    def compact(self, num_entries: int) -> None:
        """Drop the stale items when there are more of them than entries."""
        if len(self.items) > 2 * num_entries + 64:
            self.items = [item for item in self.items if not _is_stale(item)]
            heapq.heapify(self.items)

    def ranked(self, entry: CacheEntry, idle_since: int) -> Item:
        facts = CachedBlock(
            block=entry.block,
            num_hits=entry.num_hits,
            num_before=entry.num_before,
            cached_at=entry.cached_at,
            used_at=entry.used_at,
            idle_since=idle_since,
        )
        try:
            rank = tuple(map(float, self._eviction.rank(facts)))
        except Exception as error:  # somebody's plugin
            raise ComponentFailure(f"eviction '{self._name}'", f"raised {describe(error)}") from error
        if any(value != value for value in rank):
            raise ComponentFailure(f"eviction '{self._name}'", f"ranked {facts} as {rank}: NaN has no order")
        return rank, entry.block, next(self._numbers), entry


def _is_stale(item: Item) -> bool:
    return item[3].rank is not item[0]


class EvictionOrder:
    """A heap's entries from the lowest rank on, without taking them out: a frontier of its nodes, the least first.

    Costs O(log n) an entry. The heap must not change meanwhile.
    """

    def __init__(self, heap: EvictionHeap) -> None:
        heap.settle()
        self._heap = heap
        self._frontier = [(*heap.items[0], 0)] if heap.items else []

    def add(self, entry: CacheEntry, idle_since: int) -> None:
        """One more, which is not in the heap."""
        heapq.heappush(self._frontier, (*self._heap.ranked(entry, idle_since), -1))

    def pop(self) -> CacheEntry:
        """The next one. May return an entry again that was added meanwhile; IndexError when there is none."""
        items = self._heap.items
        while True:
            *_, entry, index = heapq.heappop(self._frontier)
            if index < 0:
                return entry
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(items):
                    heapq.heappush(self._frontier, (*items[child], child))
            if not _is_stale(items[index]):
                return entry
