"""Case by case: equal texts side by side, forks, ends of sequences, effort of publishing, damage to the books."""

from __future__ import annotations

from typing import Any

import pytest

from pluglm.kv.books import Books, Table
from pluglm.testing.context import make_context
from pluglm.testing.kv_prefix_desk import Desk, words
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
from pluglm_prefix_cache.radix import RadixKV

SIZE = 4
MANAGERS = [HashPrefixKV, RadixKV]


def desk(cls: Any, num_blocks: int = 12) -> Desk:
    return Desk(lambda: cls(cls.Config(block_size=SIZE, num_blocks=num_blocks), make_context(kv_bytes=1 << 40)))


def classes(bench: Desk) -> tuple[int, int, int]:
    bench.manager.audit()
    found = bench.manager.capacity()
    return found.free_blocks, found.held_blocks, found.cached_blocks


@pytest.mark.parametrize("cls", MANAGERS)
def test_the_second_of_two_equal_texts_moves_to_the_first_ones_blocks(cls: type) -> None:
    bench = desk(cls)
    text = words(2 * SIZE + 1)
    for one in (1, 2):
        bench.start(one, text)
    assert classes(bench) == (6, 6, 0)
    bench.publish(1, text)
    bench.publish(2, text)
    assert classes(bench) == (8, 4, 0)
    assert bench.manager.block_table(2)[:2] == bench.manager.block_table(1)[:2]
    for one in (1, 2):
        bench.expect_text(one, text, "after both were published")


@pytest.mark.parametrize("cls", MANAGERS)
def test_blocks_that_a_fork_holds_too_are_not_moved(cls: type) -> None:
    """2 and its fork 3 computed what 1 published. Neither moves alone; when 2 is gone, 3 does."""
    bench = desk(cls)
    text = words(2 * SIZE)
    for one in (1, 2):
        bench.start(one, text)
    bench.publish(1, text)
    bench.change(lambda kv: kv.fork(2, 3))
    for one in (2, 3):
        bench.publish(one, text)
    assert classes(bench) == (8, 4, 0)
    bench.release(2)
    bench.publish(3, text)
    assert classes(bench) == (10, 2, 0)
    bench.release(1)
    assert classes(bench) == (10, 2, 0)
    bench.release(3)
    assert classes(bench) == (10, 0, 2)


@pytest.mark.parametrize("cls", MANAGERS)
def test_what_follows_a_block_is_given_up_with_it_or_before(cls: type) -> None:
    """1 publishes three blocks, 2 adopts two of them. 1's end can go, what 2 holds cannot."""
    bench = desk(cls, num_blocks=4)
    text = words(3 * SIZE)
    bench.leave(1, text)
    bench.start(2, text[: 2 * SIZE], bench.key(text, 2 * SIZE))
    assert classes(bench) == (1, 2, 1)
    bench.start(3, words(2 * SIZE, author=1))
    assert classes(bench) == (0, 4, 0)
    assert bench.probe(text) == 2 * SIZE


@pytest.mark.parametrize(("cls", "kept"), [(HashPrefixKV, 8), (RadixKV, 10)])
def test_the_end_of_a_released_sequence(cls: type, kept: int) -> None:
    """Also when it is preempted: released in a plan without a last publication."""
    bench = desk(cls)
    text = words(11)
    bench.start(1, text)
    bench.publish(1, text, 10)
    assert bench.probe(text) == 8
    bench.release(1)
    assert bench.probe(text) == kept


def test_an_end_is_not_kept_without_what_is_before_it() -> None:
    """2 and its fork computed what 1 published, so 2 published nothing of its own, and its end stands nowhere."""
    bench = desk(RadixKV)
    text = words(2 * SIZE + 2)
    bench.leave(1, text[: 2 * SIZE])
    bench.start(2, text)
    bench.change(lambda kv: kv.fork(2, 3), lambda kv: kv.trim(3, 2 * SIZE))
    bench.publish(2, text)
    bench.release(2)
    assert (bench.probe(text), bench.probe(text[2 * SIZE :])) == (2 * SIZE, 0)
    bench.manager.audit()


def test_an_end_that_is_taken_in_the_transaction_of_its_release_is_not_kept() -> None:
    bench = desk(RadixKV, num_blocks=3)
    text = words(2 * SIZE + 1)
    bench.start(1, text)
    bench.publish(1, text)
    bench.change(lambda kv: kv.release(1), lambda kv: kv.acquire(2), lambda kv: kv.extend(2, 1))
    assert classes(bench) == (0, 1, 2)
    assert bench.probe(text) == 2 * SIZE


def test_an_end_that_was_to_be_copied_is_neither_copied_nor_kept() -> None:
    """1 is extended beside its fork, which takes a copy of its last block, and then preempted in the same plan."""
    bench = desk(RadixKV)
    text = words(SIZE + 2)
    bench.start(1, text)
    bench.publish(1, text)
    bench.change(lambda kv: kv.fork(1, 2))
    transaction = bench.manager.transaction()
    transaction.extend(1, len(text) + 1)
    transaction.release(1)
    assert transaction.commit() == ()
    assert (bench.probe(text), classes(bench)) == (SIZE, (10, 2, 0))


def test_a_rolled_back_release_keeps_no_end() -> None:
    bench = desk(RadixKV)
    text = words(SIZE + 1)
    bench.start(1, text)
    bench.publish(1, text)
    transaction = bench.manager.transaction()
    transaction.release(1)
    transaction.rollback()
    assert bench.probe(text) == SIZE
    assert classes(bench) == (10, 2, 0)


@pytest.mark.parametrize("cls", MANAGERS)
def test_an_adoption_that_is_trimmed_gives_back_what_it_does_not_use(cls: type) -> None:
    """Back to a restart point inside the adopted tokens, in the transaction that adopted them."""
    bench = desk(cls)
    text = words(3 * SIZE)
    bench.leave(1, text)
    other = text[: SIZE + 1] + words(2, author=1)
    bench.change(
        lambda kv: kv.acquire(2, bench.key(text)), lambda kv: kv.trim(2, SIZE + 1), lambda kv: kv.extend(2, len(other))
    )
    bench.slots.write(2, SIZE + 1, other[SIZE + 1 :])
    bench.expect_text(2, other, "after its adoption was cut")
    bench.publish(2, other)
    bench.release(2)
    for wanted in (text, other):
        assert bench.start(3, wanted, bench.key(wanted)) >= SIZE
        bench.expect_text(3, wanted, "adopted later")
        bench.release(3)
    bench.manager.audit()


@pytest.mark.parametrize("cls", MANAGERS)
def test_only_what_was_never_taken_back_counts_as_published(cls: type) -> None:
    """Taken back to 2 tokens, grown and taken back to 9, all in one transaction: tokens 2 to 8 are others now."""
    bench = desk(cls)
    text = words(3 * SIZE)
    bench.start(1, text)
    bench.publish(1, text)
    other = text[:2] + words(7, author=1)
    bench.change(lambda kv: kv.trim(1, 2), lambda kv: kv.extend(1, 12), lambda kv: kv.trim(1, 9))
    bench.slots.write(1, 2, other[2:])
    bench.publish(1, other)
    bench.release(1)
    for wanted in (text, other):
        assert bench.start(1, wanted, bench.key(wanted)) >= 2 * SIZE
        bench.expect_text(1, wanted, "after it was published")
        bench.release(1)
    bench.manager.audit()


@pytest.mark.parametrize("cls", MANAGERS)
def test_a_sequence_id_starts_anew(cls: type) -> None:
    """What was said of a sequence before its release in the same transaction says nothing of the next one."""
    bench = desk(cls)
    text = words(2 * SIZE)
    bench.leave(1, text)
    bench.start(1, text, bench.key(text))
    bench.change(lambda kv: kv.trim(1, 1), lambda kv: kv.release(1), lambda kv: kv.acquire(1, bench.key(text)))
    assert bench.manager._cache.published[1].num_blocks == 2


@pytest.mark.parametrize("cls", MANAGERS)
def test_forks_of_what_a_reset_found_are_not_published(cls: type) -> None:
    """Also by way of a fork that is gone again; while a new sequence under the id of such a fork is."""
    bench = desk(cls)
    text, other = words(2 * SIZE), words(2 * SIZE, author=1)
    bench.start(1, text)
    bench.manager.reset()
    bench.change(lambda kv: kv.fork(1, 2), lambda kv: kv.fork(2, 3), lambda kv: kv.release(2))
    bench.change(
        lambda kv: kv.fork(1, 4), lambda kv: kv.release(4), lambda kv: kv.acquire(4), lambda kv: kv.extend(4, 8)
    )
    bench.slots.write(4, 0, other)
    bench.publish(3, text)
    bench.publish(4, other)
    assert (bench.probe(text), bench.probe(other)) == (0, len(other))


@pytest.mark.parametrize("cls", MANAGERS)
def test_publishing_looks_only_at_new_whole_blocks(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = desk(cls, num_blocks=60)
    text = words(40 * SIZE)
    looked: list[tuple[int, ...]] = []
    find = bench.manager._cache.index.find
    monkeypatch.setattr(bench.manager._cache.index, "find", lambda *where: looked.append(where[2]) or find(*where))
    bench.start(1, text)
    for limit in range(len(text) + 1):
        bench.publish(1, text, limit)
    assert looked == [tuple(text[at : at + SIZE]) for at in range(0, len(text), SIZE)]
    bench.release(1)
    looked.clear()
    bench.start(2, text, bench.key(text, len(text) - 1))
    looked.clear()
    bench.publish(2, text)
    assert looked == [tuple(text[-SIZE:])]


@pytest.mark.parametrize("cls", MANAGERS)
def test_a_sequence_has_one_namespace(cls: type) -> None:
    """Also one of whose fork somebody says another: what is cached stays what it was."""
    bench = desk(cls)
    text = words(2 * SIZE)
    bench.start(1, text)
    bench.publish(1, text)
    with pytest.raises(ValueError, match="sequence 1 was published under another namespace"):
        bench.publish(1, text, namespace=b"model B")
    bench.change(lambda kv: kv.fork(1, 2))
    bench.publish(2, text, namespace=b"model B")
    assert (bench.probe(text), bench.probe(text, namespace=b"model B")) == (len(text), 0)
    bench.manager.audit()


def swap_blocks(books: Books) -> None:
    books.tables[2] = Table((3, 2), 2 * SIZE)


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache, books: books.cached.add(books.free.pop()), "is cached in the books alone"),
        (lambda cache, books: books.cached.add(books.free[-1]), "is free and cached"),
        (lambda cache, books: books.cached.add(books.tables[2].blocks[0]), "is held and listed as cached"),
        (lambda cache, books: books.cached.pop(), "is lost or does not exist"),
        (lambda cache, books: setattr(cache.entries[0], "num_followers", 3), "1 entries follow block 0: 3"),
        (lambda cache, books: setattr(cache.entries[1], "block", 5), "is another's"),
        (lambda cache, books: cache.heap.discard(cache.entries[1]), "block 1 can be evicted and is not in the heap"),
        (lambda cache, books: cache.heap.add(cache.entries[0]), "or the reverse"),
        (lambda cache, books: cache.published.clear() or swap_blocks(books), "holds block 3 without its parent"),
        (lambda cache, books: setattr(cache.published[2], "entry", cache.entries[1]), "published with another block"),
        (lambda cache, books: cache.index.remove(cache.entries[1]), "4 are cached"),
    ],
)
def test_audit_finds_damage(cls: type, damage: Any, message: str) -> None:
    """Blocks 0 and 1 are cached, 2 and 3 are of sequence 2, which runs and was published."""
    bench = desk(cls)
    bench.start(1, words(2 * SIZE))
    bench.publish(1, words(2 * SIZE))
    bench.start(2, words(2 * SIZE, author=1))
    bench.publish(2, words(2 * SIZE, author=1))
    bench.release(1)
    bench.manager.audit()
    damage(bench.manager._cache, bench.manager._books)
    with pytest.raises(RuntimeError, match=message):
        bench.manager.audit()


@pytest.mark.parametrize("cls", MANAGERS)
def test_what_is_left_after_an_eviction_is_adopted(cls: type) -> None:
    """Two of four blocks go to others in the transaction; the two before them can still be adopted in it."""
    bench = desk(cls, num_blocks=4)
    text = words(4 * SIZE)
    bench.leave(1, text)
    transaction = bench.manager.transaction()
    transaction.acquire(2)
    transaction.extend(2, 2 * SIZE)
    assert transaction.acquire(3, bench.key(text)) == 2 * SIZE
    transaction.commit()
    assert classes(bench) == (0, 4, 0)
