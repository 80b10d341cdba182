"""I1 to I5: blocks are counted from outside, and what the store holds is read back. Trusts no audit alone."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import numpy as np
from trace_case import Arrival, Trace
from trace_model import POSITION_BITS, code, namespace_number
from trace_parts import Rig
from trace_play import Frame, ViolationError, Watcher

from pluglm.kernel.core import CacheKey, GroupInput, ModelInput, Segment, Sequence
from pluglm.kernel.interfaces.kv import GroupTable

PROBE_ID = 1 << 40  # a sequence of the oracle's own
AUDIT_SAYS = {"share": "I2", "in the free list twice": "I3", "free and held": "I3"}


class MemoryWatch(Watcher):
    """Counts blocks and reads slots back after every step."""

    def __init__(self, trace: Trace, rig: Rig, counts: Counter[str]) -> None:
        self._rig, self._counts = rig, counts
        self._kv, self._core = rig.kv, rig.core
        self._block_size = self._kv.layout.block_size
        self._store, self._groups = self._core.parts.runner.store, self._kv.layout.groups
        self._may_be_poisoned = bool(trace.faults)
        self._has_cache = self._core.parts.prefix_cache is not None
        self._lanes: dict[int, Sequence] = {}
        self._first_lanes: dict[str, int] = {}
        self._salts: dict[bytes, str] = {}
        self._computed: dict[bytes, set[int]] = {}  # namespace -> checksums of prefixes computed since the last reset
        self._out_of_date: set[int] = set()  # sequences with KV that is older than the last reset
        self._entries: list[Any] = []
        self._offloaded: set[int] = set()  # before the step
        self._searched: dict[int, list[int]] = {}  # tokens of the lanes of searches in the batch

    def arrived(self, arrival: Arrival, refused: str | None) -> None:
        if refused is not None:
            return
        lane = next(one for one in self._core.roster.live() if one.request.request_id == arrival.name)
        self._meet(lane)
        if self._has_cache and self._salts.setdefault(lane.namespace, arrival.salt) != arrival.salt:
            raise ViolationError("I5", f"salts '{self._salts[lane.namespace]}' and '{arrival.salt}' share a namespace")

    def _meet(self, lane: Sequence) -> None:
        """Know a sequence; a lane that was forked has KV as old as that of the first lane."""
        self._lanes[lane.sequence_id] = lane
        first = self._first_lanes.setdefault(lane.request.request_id, lane.sequence_id)
        if first in self._out_of_date and lane.walk is None:  # nobody knows which lane one of a search comes from
            self._out_of_date.add(lane.sequence_id)

    def reset(self) -> None:
        self._computed.clear()
        live = self._core.roster.live()
        self._out_of_date = {one.sequence_id for one in live if one.holds_kv or one.offloaded is not None}
        for lane in self._lanes.values():
            if self._has_cache and self._kv.probe(key_of(lane)):
                raise ViolationError("I5", f"after a reset the cache still knows sequence {lane.sequence_id}")

    def before_step(self, step: int) -> None:
        self._entries = self._known_entries()
        self._offloaded = {one.sequence_id for one in self._core.roster.waiting.values() if one.offloaded is not None}

    def _known_entries(self) -> list[Any]:
        cache = getattr(self._kv, "_cache", None)
        return list(getattr(cache, "entries", {}).values())

    def writing(self, inputs: ModelInput) -> None:
        self._counts["copies on write"] += len(inputs.copies)
        lanes = (self._lanes[one.sequence_id] for one in inputs.segments)
        self._searched = {one.sequence_id: list(one.token_ids) for one in lanes if one.walk is not None}
        tables = self._tables()
        holders = Counter(block for table in tables.values() for block in table)
        for sequence_id in self._offloaded & {one.sequence_id for one in inputs.segments}:
            self._read_all_back(self._lanes[sequence_id], tables[sequence_id])
        for part in inputs.groups or (inputs,):
            first = self._first_block(part.layers[0]) if isinstance(part, GroupInput) else 0
            for segment in part.segments:
                for block in written_blocks(segment, self._block_size):
                    if (count := holders[first + block]) != 1:
                        what = f"sequence {segment.sequence_id} writes to block {block}, which {count} tables hold"
                        raise ViolationError("I4", what)

    def _first_block(self, layer: int) -> int:
        """Of the layer's group, in the numbers of the whole layout."""
        number = next((n for n, group in enumerate(self._groups) if layer in group.layers), 0)
        return sum(group.num_blocks for group in self._groups[:number])

    def _tables(self) -> dict[int, tuple[int, ...]]:
        """By sequence id, of everyone who may hold KV. I1 when somebody should and does not, or the reverse."""
        tables: dict[int, tuple[int, ...]] = {}
        for one in self._core.roster.live():
            table = self._table(one.sequence_id)
            if (table is not None) != one.holds_kv:
                what = "has no table" if table is None else f"waits and holds blocks {table}"
                raise ViolationError("I1", f"sequence {one.sequence_id} {what}")
            if table is not None:
                tables[one.sequence_id] = table
        for sequence_id in self._core.memory.held_back:
            if (table := self._table(sequence_id)) is not None:
                tables[sequence_id] = table
        return tables

    def _table(self, sequence_id: int) -> tuple[int, ...] | None:
        try:
            return tuple(self._kv.block_table(sequence_id))
        except KeyError:
            return None

    def after_step(self, frame: Frame) -> None:
        for lane in self._core.roster.live():
            if lane.sequence_id not in self._lanes:
                self._meet(lane)
        tables = self._tables()
        self._count_blocks(tables)
        self._look_up_adopted(frame)
        self._note_computed(frame)
        for lane in self._core.roster.live():
            if lane.holds_kv:
                self._read_all_back(lane, tables[lane.sequence_id])
        kept = set(map(id, self._known_entries()))
        self._counts["evictions"] += sum(id(one) not in kept for one in self._entries)
        self._entries = []

    def _count_blocks(self, tables: dict[int, tuple[int, ...]]) -> None:
        holders = Counter(block for table in tables.values() for block in table)
        capacity = self._kv.capacity()
        classes = (capacity.free_blocks, capacity.held_blocks, capacity.cached_blocks)
        for books, first, num_blocks in all_books(self._kv):
            held = {block - first: count for block, count in holders.items() if first <= block < first + num_blocks}
            count_books(books, Counter(held), num_blocks)
        if sum(classes) != capacity.total_blocks or min(classes) < 0:
            raise ViolationError("I1", f"free, held and cached blocks are {classes} of {capacity.total_blocks}")
        if capacity.held_blocks != len(holders):
            raise ViolationError("I1", f"{capacity.held_blocks} blocks are held, the tables have {len(holders)}")
        try:
            self._kv.audit()
        except RuntimeError as error:
            name = next((name for words, name in AUDIT_SAYS.items() if words in str(error)), "I1")
            raise ViolationError(name, str(error)) from error

    def _look_up_adopted(self, frame: Frame) -> None:
        """An adopted prefix was computed before, whole and in the same namespace."""
        if frame.view is None:
            return
        had = {one.sequence_id: one.num_computed for one in frame.view.waiting}
        for segment in (one for inputs in frame.batches for one in inputs.segments):
            sequence_id, num_adopted = segment.sequence_id, segment.num_context
            if num_adopted > had.get(sequence_id, num_adopted):
                self._counts["prefix hits"] += 1
                self._counts["adopted tokens"] += num_adopted
                self._out_of_date.discard(sequence_id)
                lane = self._lanes[sequence_id]
                self._require_computed(lane, self._searched.get(sequence_id, lane.token_ids)[:num_adopted])

    def _require_computed(self, lane: Sequence, token_ids: list[int]) -> None:
        checksum = checksums(lane.namespace, token_ids)[-1]
        if checksum not in self._computed.get(lane.namespace, ()):
            what = (
                f"{len(token_ids)} tokens are cached for sequence {lane.sequence_id}, which nobody computed like that"
            )
            raise ViolationError("I5", what)

    def _note_computed(self, frame: Frame) -> None:
        if not self._has_cache:
            return
        for segment in (one for inputs in frame.batches for one in inputs.segments):
            lane = self._lanes[segment.sequence_id]
            if not segment.num_context:
                self._out_of_date.discard(segment.sequence_id)
            known = self._computed.setdefault(lane.namespace, set())
            if lane.walk is not None:  # a lane that the search has dropped has forgotten its tokens
                known.update(checksums(lane.namespace, self._searched[lane.sequence_id][: segment.num_keys]))
            elif segment.sequence_id not in self._out_of_date:
                known.update(checksums(lane.namespace, lane.token_ids[: lane.num_sound]))

    def _read_all_back(self, lane: Sequence, table: tuple[int, ...]) -> None:
        num_tokens = lane.num_sound if self._may_be_poisoned else lane.num_computed
        for layer, one in self._layer_tables(lane.sequence_id, table).items():
            self._read_back(lane, num_tokens, layer, one)

    def _layer_tables(self, sequence_id: int, table: tuple[int, ...]) -> dict[int, GroupTable]:
        """One layer of each group, and its table; of the first layer, where one table serves them all."""
        if not self._groups:
            return {0: GroupTable(0, table)}
        tables = self._kv.group_tables(sequence_id)
        return {group.layers[0]: one for group, one in zip(self._groups, tables, strict=True)}

    def _read_back(self, lane: Sequence, num_tokens: int, layer: int, table: GroupTable) -> None:
        """What a layer stores of a sequence's tokens: all that a query to come may see, in its own namespace."""
        name, (start, blocks), size = f"sequence {lane.sequence_id}", table, self._block_size
        window = self._core.parts.runner.spec.layers[layer].window
        if start and (window is None or start > max(num_tokens, lane.num_computed) - window + 1):
            raise ViolationError("I5", f"{name} gave back {start} of {lane.num_computed} tokens in layer {layer}")
        if num_tokens - start > len(blocks) * size:
            raise ViolationError("I5", f"{name} has {len(blocks)} blocks for tokens {start} to {num_tokens}")
        if num_tokens <= start:
            return
        slots = (np.array(blocks)[:, None] * size + np.arange(size)).ravel()[: num_tokens - start]
        tokens = self._store.keys(layer).numpy()[slots, 0, 0]
        places = self._store.values(layer).numpy()[slots, 0, 0]
        wanted = np.arange(start, num_tokens) + self._rig.namespace_number(lane.namespace)
        wrong = (tokens != lane.token_ids[start:num_tokens]) | (places != wanted)
        if wrong.any():
            at = int(wrong.argmax())
            there = f"token {tokens[at]} of position {places[at] % (1 << POSITION_BITS)}"
            what = f"the slot holds {there}, not token {lane.token_ids[start + at]}"
            raise ViolationError("I5", f"{name}, position {start + at}: {what} of its own namespace")

    def drained(self) -> None:
        """What is still cached is adopted once more and read back; then the cache is emptied."""
        for tier in self._core.parts.tiers.counts.values():
            self._counts["blocks stored in a tier"] += tier.num_stored
            self._counts["blocks loaded from a tier"] += tier.num_loaded
        if self._has_cache:
            for lane in self._lanes.values():
                self._adopt_once_more(lane)
            self._rig.reset_cache()
            self.reset()
        self._count_blocks({})
        capacity = self._kv.capacity()
        if capacity.free_blocks != capacity.total_blocks:
            raise ViolationError(
                "I10", f"nobody is left, and {capacity.free_blocks} of {capacity.total_blocks} are free"
            )

    def _adopt_once_more(self, lane: Sequence) -> None:
        num_tokens, transaction = self._kv.probe(key_of(lane)), self._kv.transaction()
        num_adopted = transaction.acquire(PROBE_ID, key_of(lane))
        transaction.commit()
        if num_adopted != num_tokens:
            raise ViolationError("I5", f"probe promised {num_tokens} tokens, acquire gave {num_adopted}")
        if num_adopted:
            self._require_computed(lane, lane.token_ids[:num_adopted])
            for layer, one in self._layer_tables(PROBE_ID, self._table(PROBE_ID) or ()).items():
                self._read_back(lane, num_adopted, layer, one)
        transaction = self._kv.transaction()
        transaction.release(PROBE_ID)
        transaction.commit()


def key_of(lane: Sequence) -> CacheKey:
    """Of everything that a sequence knew."""
    return CacheKey(lane.namespace, lane.token_ids, len(lane.token_ids))


def checksums(namespace: bytes, token_ids: list[int]) -> list[int]:
    """Of the first 1, 2, ... tokens."""
    number, found, checksum = namespace_number(namespace), [], 0
    for position, token in enumerate(token_ids):
        checksum = zlib.crc32(code(token, position, number), checksum)
        found.append(checksum)
    return found


def written_blocks(segment: Segment, block_size: int) -> tuple[int, ...]:
    return segment.block_table[segment.num_context // block_size : -(-segment.num_keys // block_size)]


def all_books(kv: Any) -> list[tuple[Any, int, int]]:
    """The Books of a manager that keeps some, with their first block and how many they are of."""
    if (books := getattr(kv, "_books", None)) is not None:
        return [(books, 0, books.num_blocks)]
    pools = getattr(getattr(kv, "_pools", None), "pools", ())
    return [(pool.books, pool.first_block, pool.books.num_blocks) for pool in pools]


def count_books(books: Any, holders: Counter[int], num_blocks: int) -> None:
    """The classes, holders and free list of managers that keep Books, recounted from the tables."""
    shared = {block: count for block, count in holders.items() if count > 1}
    if shared != books.shares:
        raise ViolationError("I2", f"the tables share {shared}, the books say {books.shares}")
    free = set(books.free)
    if len(free) != len(books.free) or free & holders.keys():
        raise ViolationError("I3", f"free list {sorted(books.free)}, held blocks {sorted(holders)}")
    if free & books.cached or holders.keys() & books.cached:
        raise ViolationError("I1", f"cached blocks {sorted(books.cached)} are in another class too")
    if free | holders.keys() | books.cached != set(range(num_blocks)):
        raise ViolationError(
            "I1", f"of {num_blocks} blocks {len(free)} are free and {len(holders)} held: some are lost"
        )
