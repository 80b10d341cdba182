"""The kit's part about prefix caches is tested: a plain cache passes, and each broken one fails exactly its check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pluglm.kernel.core import CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import Capacity
from pluglm.testing.block_kv import BlockKV
from pluglm.testing.check import run_checks
from pluglm.testing.kv import kv_checks
from pluglm.testing.kv_prefix import prefix_checks
from pluglm.testing.kv_prefix_desk import SPACE
from pluglm.testing.prefix_pool import PrefixBook, PrefixPool, PrefixTransaction

WHOLE_POOL = 192  # tokens: 48 blocks of 4


def broken(**transaction_methods: Any) -> type[PrefixPool]:
    """PrefixPool with other methods in its transactions."""
    transaction = type("Broken", (PrefixTransaction,), transaction_methods)
    return type("BrokenPool", (PrefixPool,), {"Transaction": transaction})


def with_book(book: type[PrefixBook]) -> type[PrefixPool]:
    """PrefixPool that starts with another kind of book, which copies itself."""

    def start(self: PrefixPool, *arguments: Any) -> None:
        PrefixPool.__init__(self, *arguments)
        self.book = book()

    def copy(self: PrefixBook) -> PrefixBook:
        same = PrefixBook.copy(self)
        return book(same.tables, same.sizes, same.known, same.barred)

    book.copy = copy  # type: ignore[method-assign]
    return type("BrokenPool", (PrefixPool,), {"__init__": start})


class HidesRunning(PrefixPool):
    def probe(self, key: CacheKey) -> int:
        is_hidden = self.book.holders() and not self.book.cached() and len(key.token_ids) == 12
        return 0 if is_hidden else super().probe(key)


class BelievesTheLastBlock(PrefixPool):
    def probe(self, key: CacheKey) -> int:
        same = sum(token == place for place, token in enumerate(key.token_ids))
        return 12 if len(key.token_ids) == 12 and 8 < same < 12 else super().probe(key)


class RoundsTheLimitUp(PrefixBook):
    def match(self, key: CacheKey, block_size: int) -> list[int]:
        if key.limit == 7 and list(key.token_ids) == list(range(9)):
            key = replace(key, limit=8)
        return super().match(key, block_size)


class ForgetsWhenAsked(PrefixPool):
    def probe(self, key: CacheKey) -> int:
        if key.namespace == b"none":
            self.book.known.popitem()
        return super().probe(key)


def adopts_without_a_key(self: PrefixTransaction, sequence_id: int, key: CacheKey | None = None) -> int:
    if key is None and sequence_id == 9 and len(self.book.known) == 2 and not self.book.tables:
        key = CacheKey(*max(self.book.known.values(), key=lambda prefix: len(prefix[1])), limit=8)
    return PrefixTransaction.acquire(self, sequence_id, key)


class LooksAtTheFirstLetter(PrefixBook):
    def match(self, key: CacheKey, block_size: int) -> list[int]:
        names = [namespace for namespace, _ in self.known.values() if namespace[:1] == key.namespace[:1]]
        return super().match(replace(key, namespace=names[0]) if names else key, block_size)


class WritesIntoTheCache(PrefixTransaction):
    """Adopts six of eight tokens and goes on in the same block, which stays known."""

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        text = [] if key is None else list(key.token_ids)
        if len(text) != 8 or text[:6] != list(range(6)) or text[6] < 100_000:
            return super().acquire(sequence_id, key)
        super().acquire(sequence_id, CacheKey(SPACE, list(range(8)), 8))
        self.book.sizes[sequence_id] = 6
        return 6

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        in_place = self.book.sizes[sequence_id] == 6 and num_tokens == 8 and len(self.book.tables) == 1
        known = dict(self.book.known)
        super().extend(sequence_id, num_tokens, evict)
        if in_place:
            self.book.known = known


def keeps_what_is_rewritten(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    known = dict(self.book.known)
    PrefixTransaction.extend(self, sequence_id, num_tokens, evict)
    if (SPACE, tuple(range(8))) in known.values() and sequence_id == 1 and num_tokens == 7:
        self.book.known = known


def forks_share_what_they_write(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    if (SPACE, (0, 1, 2, 3)) in self.book.known.values() and set(self.book.tables) == {1, 2} and num_tokens == 7:
        self.book.sizes[sequence_id] = num_tokens
    else:
        PrefixTransaction.extend(self, sequence_id, num_tokens, evict)


class KeepsBoth(PrefixPool):
    def publish(self, sequence_id: int, key: CacheKey) -> None:
        known, self.book.known = self.book.known, {}
        super().publish(sequence_id, key)
        self.book.known = {**self.book.known, **known}


class MissesOne(PrefixPool):
    """Second blocks of the small tokens that only one check uses in this namespace."""

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        super().publish(sequence_id, key)
        if key.namespace == SPACE and set(key.token_ids) <= {0, 1, 2}:
            known = {block: prefix for block, prefix in self.book.known.items() if len(prefix[1]) != 8}
            self.book.known = known


def evicts_without_forgetting(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    known = dict(self.book.known)
    PrefixTransaction.extend(self, sequence_id, num_tokens, evict)
    if sequence_id == 2 and num_tokens == WHOLE_POOL:
        self.book.known = known


class BeginningsFirst(PrefixBook):
    def cached(self) -> list[int]:
        return super().cached()[::-1]


def takes_held_blocks(self: PrefixTransaction) -> list[int]:
    free = PrefixTransaction.free_list(self)
    return free or (sorted(self.book.known) if 1_000 in self.book.tables else [])


def promises_what_was_adopted(self: PrefixTransaction, evict: bool = True) -> int:
    is_first = set(self.book.tables) == {1} and not self.manager.book.tables and self.book.sizes[1] == 8
    return PrefixTransaction.free_blocks(self, evict) + 2 * is_first


def adopts_what_it_evicted(self: PrefixTransaction, sequence_id: int, key: CacheKey | None = None) -> int:
    if key is None or key.namespace != SPACE or len(self.manager.book.known) - len(self.book.known) != 2:
        return PrefixTransaction.acquire(self, sequence_id, key)
    PrefixTransaction.acquire(self, sequence_id)
    self.book.tables[sequence_id] = self.manager.book.match(key, self.manager.block_size)
    self.book.sizes[sequence_id] = len(self.book.tables[sequence_id]) * self.manager.block_size
    return self.book.sizes[sequence_id]


def overwrites_a_source(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    PrefixTransaction.extend(self, sequence_id, num_tokens, evict)
    if sequence_id == 2 and self.book.sizes.get(1) == 5 and not self.manager.book.tables and self.book.known:
        self.book.tables[2][-1] = self.book.tables[1][0]


def counts_the_cache_as_free(self: PrefixTransaction, evict: bool = True) -> int:
    return PrefixTransaction.free_blocks(self, evict or not self.book.tables)


def evicts_though_told_not_to(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    PrefixTransaction.extend(self, sequence_id, num_tokens, evict or bool(self.book.known))


def evicts_on_rollback(self: PrefixTransaction) -> None:
    if set(self.book.tables) == {1, 2} and len(self.manager.book.known) == 4:
        self.manager.book.known.clear()
    PrefixTransaction.rollback(self)


def evicts_at_once(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    PrefixTransaction.extend(self, sequence_id, num_tokens, evict)
    if sequence_id == 3 and num_tokens == WHOLE_POOL:
        self.manager.book.known.clear()


def evicts_before_it_refuses(self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    try:
        PrefixTransaction.extend(self, sequence_id, num_tokens, evict)
    except KVExhausted:
        if num_tokens == WHOLE_POOL + 4 and sequence_id == 2:
            self.book.known.clear()
        raise


def forgets_on_a_second_release(self: PrefixTransaction, sequence_id: int) -> None:
    if sequence_id not in self.book.tables and self.book.known:
        self.book.known.popitem()
    PrefixTransaction.release(self, sequence_id)


class IgnoresStrangers(PrefixPool):
    def publish(self, sequence_id: int, key: CacheKey) -> None:
        if sequence_id in self.book.tables:
            super().publish(sequence_id, key)


class AlwaysOpen(PrefixPool):
    def _require_closed(self) -> None:
        """Never mind."""


class TrustsOldTables(PrefixPool):
    def reset(self) -> None:
        self._require_closed()
        self.book.known.clear()


def relatives_share_what_they_write(
    self: PrefixTransaction, sequence_id: int, num_tokens: int, evict: bool = True
) -> None:
    room = len(self.book.tables[sequence_id]) * self.manager.block_size
    if self.book.known and sequence_id > 5 and self.book.sizes[sequence_id] < num_tokens <= room:
        self.book.sizes[sequence_id] = num_tokens
    else:
        PrefixTransaction.extend(self, sequence_id, num_tokens, evict)


class LosesACachedBlock(PrefixPool):
    def capacity(self) -> Capacity:
        found = super().capacity()
        is_lost = found.cached_blocks > 0 and len(self.book.tables) > 2
        return replace(found, cached_blocks=found.cached_blocks - is_lost)


BROKEN: dict[str, type[PrefixPool]] = {
    "published_blocks_are_found": HidesRunning,
    "no_more_than_the_common_beginning_is_found": BelievesTheLastBlock,
    "the_limit_holds_at_every_length": with_book(RoundsTheLimitUp),
    "probing_changes_nothing": ForgetsWhenAsked,
    "nothing_is_adopted_without_a_key": broken(acquire=adopts_without_a_key),
    "namespaces_never_mix": with_book(LooksAtTheFirstLetter),
    "adopters_diverge_without_a_trace": type("Writes", (PrefixPool,), {"Transaction": WritesIntoTheCache}),
    "publishers_write_on_without_a_trace": broken(extend=keeps_what_is_rewritten),
    "forks_and_the_cache_share_blocks": broken(extend=forks_share_what_they_write),
    "equal_texts_may_be_published_side_by_side": KeepsBoth,
    "all_that_was_published_is_found_while_there_is_room": MissesOne,
    "eviction_forgets": broken(extend=evicts_without_forgetting),
    "ends_are_evicted_before_beginnings": with_book(BeginningsFirst),
    "held_blocks_are_never_evicted": broken(free_list=takes_held_blocks),
    "adopted_blocks_are_not_evicted_by_their_own_transaction": broken(free_blocks=promises_what_was_adopted),
    "what_a_transaction_evicts_it_does_not_adopt": broken(acquire=adopts_what_it_evicted),
    "copies_come_before_what_overwrites_their_source": broken(extend=overwrites_a_source),
    "cached_blocks_are_room": broken(free_blocks=counts_the_cache_as_free),
    "extension_without_eviction_keeps_the_cache": broken(extend=evicts_though_told_not_to),
    "rollback_undoes_adoption_and_eviction": broken(rollback=evicts_on_rollback),
    "the_cache_changes_with_the_commit": broken(extend=evicts_at_once),
    "a_refused_extension_keeps_the_cache": broken(extend=evicts_before_it_refuses),
    "a_second_release_counts_nothing": broken(release=forgets_on_a_second_release),
    "publish_asks_for_stored_tokens": IgnoresStrangers,
    "transactions_shut_out_publish_and_reset": AlwaysOpen,
    "reset_forgets_everything": TrustsOldTables,
    "walks_keep_every_text": broken(extend=relatives_share_what_they_write),
    "classes_sum_to_total_with_a_cache": LosesACachedBlock,
}


def test_a_plain_cache_passes() -> None:
    report = run_checks(kv_checks(PrefixPool))
    assert report.ok, str(report)


def test_only_managers_with_a_cache_are_asked() -> None:
    plain = {check.name for check in kv_checks(BlockKV)}
    assert {check.name for check in kv_checks(PrefixPool)} - plain == set(BROKEN)
    assert not plain & set(BROKEN)


def test_every_check_has_a_broken_fixture() -> None:
    unbuilt: Any = None  # nothing is built before a check is run
    assert {check.name for check in prefix_checks(unbuilt)} == set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cache_fails_exactly_its_check(name: str) -> None:
    report = run_checks(kv_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
