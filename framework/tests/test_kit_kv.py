"""The kit of KV managers is tested: a plain manager passes, and for every check one broken manager fails only that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pluglm.kernel.core import CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import Capacity
from pluglm.testing.block_kv import BlockKV, BlockTransaction
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.kv import kv_checks


def broken(**transaction_methods: Any) -> type[BlockKV]:
    """BlockKV with other methods in its transactions."""
    transaction = type("Broken", (BlockTransaction,), transaction_methods)
    return type("BrokenKV", (BlockKV,), {"Transaction": transaction})


def rounds_down(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    size = self.book.sizes[sequence_id]
    if size > 150 and size % 4 == 0 and num_tokens == size + 1:
        self.book.sizes[sequence_id] = num_tokens  # a new block is due at this very token
        return
    BlockTransaction.extend(self, sequence_id, num_tokens, evict)


class InventsBlocks(BlockKV):
    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        table = super().block_table(sequence_id)
        return tuple(block + 1 for block in table) if len(self.book.tables) == self.num_blocks else table


def shrinks(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    BlockTransaction.extend(self, sequence_id, num_tokens, evict)
    if num_tokens == 1:
        self.trim(sequence_id, 1)


def moves_the_first_block(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    grows_at_once = self.book.sizes[sequence_id] == 1 and num_tokens == 192
    BlockTransaction.extend(self, sequence_id, num_tokens, evict)
    if grows_at_once:
        self.book.tables[sequence_id].reverse()


def keeps_one_block_too_many(self: BlockTransaction, sequence_id: int, num_tokens: int) -> None:
    if num_tokens == 96 and self.book.sizes[sequence_id] == 192:
        num_tokens += 1
    BlockTransaction.trim(self, sequence_id, num_tokens)


def takes_before_it_counts(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    try:
        BlockTransaction.extend(self, sequence_id, num_tokens, evict)
    except KVExhausted:
        if num_tokens > 192 and self.book.sizes[sequence_id]:
            self.book.tables[sequence_id].append(0)
        raise


def commits_on_rollback(self: BlockTransaction) -> None:
    if self.free_blocks() == 1 and len(self.book.tables) == 47:
        self.commit()
    self.manager.is_open = False


def publishes_early(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    BlockTransaction.extend(self, sequence_id, num_tokens, evict)
    if set(self.book.tables) == {1, 2} and self.book.sizes == {1: 1, 2: 1}:
        self.manager.book = self.book.copy()


def acquires_again(self: BlockTransaction, sequence_id: int, key: CacheKey | None = None) -> int:
    return 0 if sequence_id in self.book.tables else BlockTransaction.acquire(self, sequence_id, key)


def releases_again(self: BlockTransaction, sequence_id: int) -> None:
    if sequence_id in self.book.tables:
        BlockTransaction.release(self, sequence_id)


def refuses_without_eviction(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    if not evict:
        raise KVExhausted("nothing is free without eviction")
    BlockTransaction.extend(self, sequence_id, num_tokens)


class OpensTwice(BlockKV):
    def transaction(self) -> BlockTransaction:
        self.is_open = False
        return super().transaction()


class PromisesTooMuch(BlockKV):
    def max_request_tokens(self) -> int:
        return super().max_request_tokens() - 1


class EmptyTable(BlockKV):
    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        return () if sequence_id == 12345 and sequence_id not in self.book.tables else super().block_table(sequence_id)


def hands_out_a_held_block(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    first = self.book.sizes[sequence_id] == 0
    BlockTransaction.extend(self, sequence_id, num_tokens, evict)
    if first and num_tokens == 1 and 5 < sequence_id < 50 and len(self.book.tables) == 3:
        self.book.tables[sequence_id] = self.book.tables[min(self.book.tables)][:1]


class LosesABlock(BlockKV):
    def capacity(self) -> Capacity:
        found = super().capacity()
        return replace(found, free_blocks=found.free_blocks - 1) if len(self.book.tables) == 3 else found


class CountsHoldersTwice(BlockKV):
    def capacity(self) -> Capacity:
        held = sum(len(table) for table in self.book.tables.values())
        return Capacity(total_blocks=self.num_blocks, free_blocks=self.num_blocks - held, held_blocks=held)


class CountsOldBlocks(BlockKV):
    class Transaction(BlockTransaction):
        def free_blocks(self, evict: bool = True) -> int:
            return self.manager.capacity().free_blocks


class AuditsTooMuch(BlockKV):
    def audit(self) -> None:
        super().audit()
        if len(self.book.tables) > 3:
            raise RuntimeError("more than three tables")


class Leaks(BlockKV):
    """One block is lost whenever the pool becomes idle, from the sixth sequence on."""

    def capacity(self) -> Capacity:
        found = super().capacity()
        lost = self.num_releases > 20 and not found.held_blocks
        return replace(found, free_blocks=found.free_blocks - 1, total_blocks=found.total_blocks - 1) if lost else found

    num_releases = 0

    class Transaction(BlockTransaction):
        def release(self, sequence_id: int) -> None:
            super().release(sequence_id)
            self.manager.num_releases += 1


def forks_backwards(self: BlockTransaction, parent_id: int, child_id: int) -> None:
    BlockTransaction.fork(self, parent_id, child_id)
    if self.book.sizes[parent_id] == 49:
        self.book.tables[child_id].reverse()


def writes_into_the_parent(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    long_child = num_tokens == 98 and sequence_id == 2 and sequence_id in self.manager.book.tables
    extend_in_place(self, sequence_id, num_tokens, long_child)


def writes_into_the_child(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    extend_in_place(self, sequence_id, num_tokens, num_tokens == 98 and sequence_id == 1)


def writes_into_late_relatives(self: BlockTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    extend_in_place(
        self, sequence_id, num_tokens, sequence_id > 3 and 1 < num_tokens <= len(self.book.tables[sequence_id]) * 4
    )


def extend_in_place(self: BlockTransaction, sequence_id: int, num_tokens: int, in_place: bool) -> None:
    """Without the copy of shared blocks, if in_place."""
    if in_place:
        self.book.sizes[sequence_id] = num_tokens
    else:
        BlockTransaction.extend(self, sequence_id, num_tokens)


class FreesSharedBlocks(BlockTransaction):
    """What the parent shared counts as free once the parent is gone."""

    def release(self, sequence_id: int) -> None:
        if set(self.book.tables) == {1, 2} and self.book.sizes[sequence_id] == 97:
            self.manager.freed = list(self.book.tables[sequence_id])
        super().release(sequence_id)

    def free_list(self) -> list[int]:
        freed = getattr(self.manager, "freed", [])
        return [freed.pop(), *super().free_list()] if freed else super().free_list()


class CopiesInChains(BlockTransaction):
    def commit(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.copied_from[target], target) for _, target in super().commit())

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        before = list(self.book.tables[sequence_id])
        super().extend(sequence_id, num_tokens, evict)
        changed = zip(before, self.book.tables[sequence_id], strict=False)
        self.copied_from = {**getattr(self, "copied_from", {}), **{new: old for old, new in changed}}


BROKEN: dict[str, type[BlockKV]] = {
    "tables_cover_the_tokens": broken(extend=rounds_down),
    "blocks_exist": InventsBlocks,
    "extend_never_shrinks": broken(extend=shrinks),
    "extend_keeps_earlier_blocks": broken(extend=moves_the_first_block),
    "trim_gives_back_whole_blocks": broken(trim=keeps_one_block_too_many),
    "exhaustion_changes_nothing": broken(extend=takes_before_it_counts),
    "rollback_restores_everything": broken(rollback=commits_on_rollback),
    "extension_without_eviction_takes_what_is_free": broken(extend=refuses_without_eviction),
    "nothing_is_visible_before_commit": broken(extend=publishes_early),
    "second_acquire_raises": broken(acquire=acquires_again),
    "second_release_raises": broken(release=releases_again),
    "second_transaction_raises": OpensTwice,
    "max_request_tokens_is_exact": PromisesTooMuch,
    "unknown_sequence_has_no_table": EmptyTable,
    "blocks_have_one_owner": broken(extend=hands_out_a_held_block),
    "classes_sum_to_total": LosesABlock,
    "held_blocks_are_those_in_tables": CountsHoldersTwice,
    "transaction_counts_its_own_blocks": CountsOldBlocks,
    "audit_accepts_sound_books": AuditsTooMuch,
    "drained_pool_is_as_free_as_at_first": Leaks,
    "child_starts_with_the_parents_tokens": broken(fork=forks_backwards),
    "parent_never_sees_the_childs_writes": broken(extend=writes_into_the_parent),
    "child_never_sees_the_parents_writes": broken(extend=writes_into_the_child),
    "forks_survive_the_parents_release": type("FreesShared", (BlockKV,), {"Transaction": FreesSharedBlocks}),
    "copies_read_all_sources_first": type("Chains", (BlockKV,), {"Transaction": CopiesInChains}),
    "forked_walk_keeps_every_text": broken(extend=writes_into_late_relatives),
}


def test_a_plain_manager_passes() -> None:
    report = run_checks(kv_checks(BlockKV))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in kv_checks(BlockKV)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manager_fails_exactly_its_check(name: str) -> None:
    report = run_checks(kv_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
