"""The contract kit of KV managers. Sees only sizes, tables and copies; a dictionary of slots stands for the tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import EvictionLog, KVManager, KVTransaction, LayerGroups, PrefixCache
from pluglm.testing.check import Check, expect, expect_raises, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context
from pluglm.testing.kv_eviction_log import eviction_log_checks
from pluglm.testing.kv_groups import group_checks
from pluglm.testing.kv_prefix import prefix_checks
from pluglm.testing.kv_sharing import fork_checks
from pluglm.testing.kv_walk import Walk

Make = Callable[[], KVManager]


def kv_checks(cls: type[Any], config: Any = None, **context: Any) -> Iterator[Check]:
    """Every check of a KV manager class. context: fields of the BuildContext to use instead of the kit's.

    A sequence must have room for at least 8 tokens, and the pool for four such sequences. One that reuses prefixes must
    have 8 blocks or more, all of which one sequence may hold.
    """
    config = cls.Config() if config is None else config

    def make() -> KVManager:
        manager: KVManager = cls(config, make_context(**context))
        return manager

    yield from common_checks("kv", cls, config, make)
    for function in PLAIN:
        yield make_check(function, make)
    yield from fork_checks(make)
    if issubclass(cls, PrefixCache):
        yield from prefix_checks(make)
    if issubclass(cls, EvictionLog):
        yield from eviction_log_checks(make)
    if issubclass(cls, LayerGroups):
        yield from group_checks(cls, config)


def change(manager: KVManager, operation: Callable[[KVTransaction], None]) -> None:
    """Run operations in a transaction of their own and commit it."""
    transaction = manager.transaction()
    operation(transaction)
    transaction.commit()


def start(manager: KVManager, sequence_id: int, num_tokens: int) -> None:
    """Acquire and extend one sequence in a transaction of its own."""

    def operation(transaction: KVTransaction) -> None:
        transaction.acquire(sequence_id)
        transaction.extend(sequence_id, num_tokens)

    change(manager, operation)


def fill(manager: KVManager) -> list[int]:
    """Start sequences until nothing is free; returns their ids."""
    ids: list[int] = []
    for number in range(manager.layout.num_blocks):
        if manager.capacity().free_blocks:
            start(manager, number, 1)
            ids.append(number)
    return ids


def snapshot(manager: KVManager, ids: range | list[int]) -> tuple[object, ...]:
    """All that a user of the manager can see of it."""
    return manager.capacity(), *(_table(manager, one) for one in ids)


def _table(manager: KVManager, sequence_id: int) -> tuple[int, ...] | None:
    try:
        return manager.block_table(sequence_id)
    except KeyError:
        return None


def tables_cover_the_tokens(make: Make) -> None:
    manager = make()
    size, most = manager.layout.block_size, manager.max_request_tokens()
    start(manager, 1, 1)
    for num_tokens in range(2, most + 1):
        change(manager, lambda transaction, n=num_tokens: transaction.extend(1, n))  # type: ignore[misc]
        held = len(manager.block_table(1)) * size
        expect(held >= num_tokens, f"slots for {num_tokens} tokens after extend", held)


def blocks_exist(make: Make) -> None:
    manager = make()
    ids = fill(manager)
    blocks = [block for one in ids for block in manager.block_table(one)]
    expect(all(0 <= block < manager.layout.num_blocks for block in blocks), "block ids of the layout", sorted(blocks))


def extend_never_shrinks(make: Make) -> None:
    manager = make()
    start(manager, 1, manager.max_request_tokens())
    before = manager.block_table(1)
    change(manager, lambda transaction: transaction.extend(1, 1))
    expect(manager.block_table(1) == before, "the same table after extending to fewer tokens", manager.block_table(1))


def extend_keeps_earlier_blocks(make: Make) -> None:
    manager = make()
    start(manager, 1, 1)
    before = manager.block_table(1)
    change(manager, lambda transaction: transaction.extend(1, manager.max_request_tokens()))
    after = manager.block_table(1)
    expect(after[: len(before)] == before, f"a table that still begins with {before}", after)


def trim_gives_back_whole_blocks(make: Make) -> None:
    manager = make()
    size, most = manager.layout.block_size, manager.max_request_tokens()
    for num_tokens in sorted({1, most // 2, most - 1, most}):
        start(manager, 1, most)
        free, held = manager.capacity().free_blocks, manager.block_table(1)
        change(manager, lambda transaction, n=num_tokens: transaction.trim(1, n))  # type: ignore[misc]
        kept = -(-num_tokens // size)
        table = manager.block_table(1)
        expect(table == held[:kept], f"the first {kept} blocks of {held} after trim to {num_tokens}", table)
        gained = manager.capacity().free_blocks - free
        expect(gained == len(held) - kept, f"{len(held) - kept} blocks given back", gained)
        change(manager, lambda transaction: transaction.release(1))


def exhaustion_changes_nothing(make: Make) -> None:
    manager = make()
    ids = fill(manager)
    transaction = manager.transaction()
    transaction.acquire(10_000)
    with expect_raises(KVExhausted, "for an extension of a full pool"):
        transaction.extend(10_000, 1)
    with expect_raises(KVExhausted, "for an extension of a held sequence of a full pool"):
        transaction.extend(ids[0], manager.max_request_tokens() + 1)
    transaction.release(10_000)
    before = snapshot(manager, ids)
    transaction.commit()
    after = snapshot(manager, ids)
    expect(after == before, f"the state before the failed extension, {before}", after)


def rollback_restores_everything(make: Make) -> None:
    manager = make()
    ids = fill(manager)
    change(manager, lambda transaction: transaction.release(ids[0]))
    before = snapshot(manager, range(len(ids) + 1))
    transaction = manager.transaction()
    transaction.acquire(ids[0])
    transaction.extend(ids[0], 1)
    transaction.release(ids[1])
    transaction.rollback()
    after = snapshot(manager, range(len(ids) + 1))
    expect(after == before, f"the state before the transaction, {before}", after)
    start(manager, ids[0], 1)


def extension_without_eviction_takes_what_is_free(make: Make) -> None:
    """`evict` makes no difference where nothing is cached."""
    manager = make()
    ids = fill(manager)
    change(manager, lambda transaction: transaction.release(ids[0]))
    transaction = manager.transaction()
    transaction.acquire(10_000)
    transaction.extend(10_000, 1, False)
    for evict in (False, True):
        transaction.acquire(10_001)
        with expect_raises(KVExhausted, f"for an extension of a full pool with evict={evict}"):
            transaction.extend(10_001, 1, evict)
        transaction.release(10_001)
    transaction.commit()


def nothing_is_visible_before_commit(make: Make) -> None:
    manager = make()
    start(manager, 1, 1)
    before = snapshot(manager, range(3))
    transaction = manager.transaction()
    transaction.acquire(2)
    transaction.extend(2, 1)
    transaction.release(1)
    after = snapshot(manager, range(3))
    transaction.commit()
    expect(after == before, f"the committed state {before} inside an open transaction", after)


def second_acquire_raises(make: Make) -> None:
    manager = make()
    start(manager, 1, 1)
    transaction = manager.transaction()
    with expect_raises(ValueError, "for an acquire of a sequence that has a table"):
        transaction.acquire(1)
    transaction.rollback()


def second_release_raises(make: Make) -> None:
    manager = make()
    start(manager, 1, 1)
    transaction = manager.transaction()
    transaction.release(1)
    with expect_raises(ValueError, "for the second release of a sequence"):
        transaction.release(1)
    transaction.rollback()


def second_transaction_raises(make: Make) -> None:
    manager = make()
    transaction = manager.transaction()
    with expect_raises(RuntimeError, "for a second open transaction"):
        manager.transaction()
    transaction.rollback()
    manager.transaction().commit()
    manager.transaction().rollback()


def max_request_tokens_is_exact(make: Make) -> None:
    manager = make()
    most = manager.max_request_tokens()
    expect(most >= 1, "room for at least one token", most)
    start(manager, 1, most)
    change(manager, lambda transaction: transaction.release(1))
    transaction = manager.transaction()
    transaction.acquire(1)
    with expect_raises(KVExhausted, f"for {most + 1} tokens in an empty pool"):
        transaction.extend(1, most + 1)
    transaction.rollback()


def unknown_sequence_has_no_table(make: Make) -> None:
    manager = make()
    with expect_raises(KeyError, "for the table of an unknown sequence"):
        manager.block_table(12345)
    start(manager, 12345, 1)
    change(manager, lambda transaction: transaction.release(12345))
    with expect_raises(KeyError, "for the table of a released sequence"):
        manager.block_table(12345)


def blocks_have_one_owner(make: Make) -> None:
    """Without forks, no block is in two tables, nor twice in one."""
    walk = Walk(make(), random.Random(1))
    for _ in range(150):
        walk.step()
        blocks = [block for one in walk.ids for block in walk.manager.block_table(one)]
        expect(len(blocks) == len(set(blocks)), "every block in one table at most", sorted(blocks))


def classes_sum_to_total(make: Make) -> None:
    walk = Walk(make(), random.Random(2))
    for _ in range(150):
        walk.step()
        capacity = walk.manager.capacity()
        expect(capacity.total_blocks == walk.manager.layout.num_blocks, "total_blocks of the layout", capacity)
        classes = capacity.free_blocks + capacity.held_blocks + capacity.cached_blocks
        expect(classes == capacity.total_blocks, "free + held + cached = total", capacity)


def held_blocks_are_those_in_tables(make: Make) -> None:
    walk = Walk(make(), random.Random(3))
    for _ in range(150):
        walk.step()
        held = {block for one in walk.ids for block in walk.manager.block_table(one)}
        found = walk.manager.capacity().held_blocks
        expect(found == len(held), f"held_blocks = {len(held)}, the distinct blocks in tables", found)
    walk.drain()
    start(walk.manager, 1, walk.manager.max_request_tokens() // 2)
    change(walk.manager, lambda transaction: transaction.fork(1, 2))
    held = {block for one in (1, 2) for block in walk.manager.block_table(one)}
    found = walk.manager.capacity().held_blocks
    expect(found == len(held), f"held_blocks = {len(held)}, a shared block counted once", found)


def transaction_counts_its_own_blocks(make: Make) -> None:
    manager = make()
    transaction = manager.transaction()
    free = transaction.free_blocks()
    expect(free == manager.capacity().free_blocks, f"{manager.capacity().free_blocks} free blocks at first", free)
    transaction.acquire(1)
    transaction.extend(1, 1)
    expect(transaction.free_blocks() == free - 1, f"{free - 1} after one was taken", transaction.free_blocks())
    transaction.release(1)
    expect(transaction.free_blocks() == free, f"{free} after it was given back", transaction.free_blocks())
    transaction.rollback()


def audit_accepts_sound_books(make: Make) -> None:
    walk = Walk(make(), random.Random(4))
    for _ in range(100):
        walk.step()
        walk.manager.audit()


def drained_pool_is_as_free_as_at_first(make: Make) -> None:
    manager = make()
    idle = manager.capacity()
    walk = Walk(manager, random.Random(5))
    for _ in range(150):
        walk.step()
    walk.drain()
    expect(manager.capacity() == idle, f"{idle} after every sequence was released", manager.capacity())
    for number in range(manager.layout.num_blocks):
        start(manager, number, 1)


PLAIN = (
    tables_cover_the_tokens,
    blocks_exist,
    extend_never_shrinks,
    extend_keeps_earlier_blocks,
    trim_gives_back_whole_blocks,
    exhaustion_changes_nothing,
    rollback_restores_everything,
    extension_without_eviction_takes_what_is_free,
    nothing_is_visible_before_commit,
    second_acquire_raises,
    second_release_raises,
    second_transaction_raises,
    max_request_tokens_is_exact,
    unknown_sequence_has_no_table,
    blocks_have_one_owner,
    classes_sum_to_total,
    held_blocks_are_those_in_tables,
    transaction_counts_its_own_blocks,
    audit_accepts_sound_books,
    drained_pool_is_as_free_as_at_first,
)
