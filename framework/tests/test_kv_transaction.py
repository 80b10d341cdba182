"""Transactions of the KV managers case by case: copy on write, chains of copies, rollback, misuse, audit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kv.books import Table
from pluglm.kv.paged import PagedKV


def paged(num_blocks: int = 8, block_size: int = 4) -> PagedKV:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BuildContext))
    fields.update(max_num_seqs=4, max_model_len=32, kv_bytes=1 << 20, bytes_per_token=8)
    return PagedKV(PagedKV.Config(block_size=block_size, num_blocks=num_blocks), BuildContext(**fields))


def with_sequence(manager: PagedKV, sequence_id: int, num_tokens: int) -> PagedKV:
    transaction = manager.transaction()
    transaction.acquire(sequence_id)
    transaction.extend(sequence_id, num_tokens)
    assert transaction.commit() == ()
    return manager


def forked(num_tokens: int, num_blocks: int = 8) -> PagedKV:
    manager = with_sequence(paged(num_blocks), 0, num_tokens)
    transaction = manager.transaction()
    transaction.fork(0, 1)
    assert transaction.commit() == ()
    return manager


def test_blocks_are_handed_out_in_order_and_reused_last_first() -> None:
    manager = with_sequence(paged(), 0, 9)
    assert manager.block_table(0) == (0, 1, 2)
    transaction = manager.transaction()
    transaction.release(0)
    transaction.commit()
    assert with_sequence(manager, 1, 5).block_table(1) == (0, 1)


def test_the_first_writer_copies_the_shared_partial_block_and_the_second_does_not() -> None:
    manager = forked(6)
    transaction = manager.transaction()
    transaction.extend(0, 7)
    transaction.extend(1, 7)
    assert transaction.commit() == ((1, 2),)
    assert (manager.block_table(0), manager.block_table(1)) == ((0, 2), (0, 1))


def test_a_full_shared_block_is_not_copied() -> None:
    manager = forked(8)
    transaction = manager.transaction()
    transaction.extend(1, 9)
    assert transaction.commit() == ()
    assert manager.block_table(1) == (0, 1, 2)


def test_rewriting_after_a_trim_copies_the_block_that_the_other_side_still_reads() -> None:
    manager = forked(8)
    transaction = manager.transaction()
    transaction.trim(1, 5)
    transaction.extend(1, 6)
    assert transaction.commit() == ((1, 2),)
    assert manager.block_table(0) == (0, 1)


def test_a_copy_needs_a_free_block() -> None:
    manager = forked(6, num_blocks=2)
    transaction = manager.transaction()
    with pytest.raises(KVExhausted, match="need 1 more blocks of 4; 0 are free"):
        transaction.extend(1, 7)
    transaction.trim(1, 4)
    assert transaction.commit() == ()
    assert manager.block_table(1) == (0,)


def test_a_copy_of_a_copy_in_one_transaction_starts_from_the_original() -> None:
    manager = forked(6)
    transaction = manager.transaction()
    transaction.extend(1, 7)  # block 2 is owed a copy of 1
    transaction.trim(1, 6)
    transaction.fork(1, 2)
    transaction.extend(2, 7)
    assert transaction.commit() == ((1, 2), (1, 3))


def test_a_copy_into_a_block_that_was_given_back_is_dropped() -> None:
    manager = forked(6, num_blocks=3)
    transaction = manager.transaction()
    transaction.extend(1, 7)
    transaction.release(1)
    transaction.acquire(2)
    transaction.extend(2, 4)
    assert transaction.commit() == ()
    assert manager.block_table(2) == (2,)


def test_rollback_after_an_exception_leaves_no_trace() -> None:
    manager = forked(6, num_blocks=4)
    before = (manager.capacity(), manager.block_table(0), manager.block_table(1))
    transaction = manager.transaction()
    transaction.extend(1, 7)
    transaction.release(0)
    with pytest.raises(KVExhausted):
        transaction.extend(1, 100)
    transaction.rollback()
    assert (manager.capacity(), manager.block_table(0), manager.block_table(1)) == before
    manager.audit()


def test_nothing_is_visible_before_commit() -> None:
    manager = with_sequence(paged(), 0, 6)
    transaction = manager.transaction()
    transaction.extend(0, 20)
    assert transaction.free_blocks() == 3
    assert manager.block_table(0) == (0, 1)
    assert manager.capacity().free_blocks == 6
    transaction.commit()
    assert len(manager.block_table(0)) == 5


def test_one_transaction_at_a_time_and_none_after_its_end() -> None:
    manager = paged()
    transaction = manager.transaction()
    with pytest.raises(RuntimeError, match="open already"):
        manager.transaction()
    transaction.commit()
    for misuse in (transaction.commit, transaction.rollback, transaction.free_blocks):
        with pytest.raises(RuntimeError, match="closed"):
            misuse()
    with pytest.raises(RuntimeError, match="closed"):
        transaction.acquire(1)
    manager.transaction().rollback()


def test_misuse_of_sequences_is_named() -> None:
    transaction = with_sequence(paged(), 0, 6).transaction()
    with pytest.raises(ValueError, match="sequence 0 has a table already"):
        transaction.acquire(0)
    with pytest.raises(ValueError, match="sequence 9 holds no table"):
        transaction.release(9)
    with pytest.raises(ValueError, match="trimmed to -1"):
        transaction.trim(0, -1)
    with pytest.raises(KeyError):
        paged().block_table(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda books: books.free.append(7), "in the free list twice"),
        (lambda books: books.free.append(0), "block 0 is free and held"),
        (lambda books: books.free.pop(), "block 2 of 8 is lost"),
        (lambda books: books.free.append(8), "block 8 of 8"),
        (lambda books: books.shares.update({0: 3}), "the books say"),
        (lambda books: books.tables.update({0: Table((0, 0), 6)}), "sequence 0 holds a block twice"),
        (lambda books: books.tables.update({0: Table((0, 1), 3)}), "2 blocks for 3 tokens"),
    ],
)
def test_audit_finds_damage(damage: Any, message: str) -> None:
    manager = forked(6)
    manager.audit()
    damage(manager._books)
    with pytest.raises(RuntimeError, match=message):
        manager.audit()
