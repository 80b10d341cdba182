"""The part of the KV kit about the room that cached blocks take: eviction, capacity, transactions, reset, walks."""

from __future__ import annotations

import random

from pluglm.kernel.errors import KVExhausted
from pluglm.testing.check import expect, expect_raises
from pluglm.testing.kv_prefix_desk import Desk, Make, words
from pluglm.testing.kv_prefix_walk import PrefixWalk
from pluglm.testing.kv_sharing import Slots


def eviction_forgets(make: Make) -> None:
    """Once others took all room the old text is not found, and who has it again has his own tokens."""
    desk = Desk(make)
    text, other = words(2 * desk.size), words(desk.num_blocks * desk.size, author=1)
    desk.leave(1, text)
    desk.start(2, other)
    desk.publish(2, other)
    expect(desk.probe(text) == 0, "nothing found of what was overwritten", desk.probe(text))
    desk.release(2)
    desk.start(1, text, desk.key(text))
    desk.expect_text(1, text, "after it was evicted and came again")


def ends_are_evicted_before_beginnings(make: Make) -> None:
    desk = Desk(make)
    text = words(desk.num_blocks * desk.size)
    desk.leave(1, text)
    for taken in range(1, desk.num_blocks):
        desk.start(taken + 1, words(1, author=taken))
        left, found = len(text) - taken * desk.size, desk.probe(text)
        expect(found == left, f"the first {left} tokens left when {taken} blocks were needed", found)


def held_blocks_are_never_evicted(make: Make) -> None:
    """Neither those of a publisher that runs nor those of an adopter."""
    desk = Desk(make)
    text, other = words(2 * desk.size), words(2 * desk.size, author=1)
    desk.leave(1, text)
    desk.start(1, text, desk.key(text))
    desk.start(2, other)
    desk.publish(2, other)
    for one in range(3, 3 + desk.num_blocks):
        if desk.has_room():
            desk.start(one, words(1, author=one))
    with expect_raises(KVExhausted, "when every block is held"):
        desk.start(1_000, words(1))
    desk.expect_text(1, text, "when the pool is full")
    desk.expect_text(2, other, "when the pool is full")


def adopted_blocks_are_not_evicted_by_their_own_transaction(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    desk.leave(1, text)
    transaction = desk.manager.transaction()
    adopted = transaction.acquire(1, desk.key(text))
    room = transaction.free_blocks()
    expect(room == desk.num_blocks - 2, f"{desk.num_blocks - 2} blocks left after 2 were adopted", room)
    transaction.acquire(2)
    transaction.extend(2, room * desk.size)
    with expect_raises(KVExhausted, "for the blocks that were adopted before"):
        transaction.extend(2, (room + 1) * desk.size)
    desk.slots.commit(transaction)
    desk.slots.write(2, 0, words(room * desk.size, author=1))
    desk.expect_text(1, text[:adopted], "after all else was taken in the same transaction")


def what_a_transaction_evicts_it_does_not_adopt(make: Make) -> None:
    """Two blocks of a cached text are taken for others; what is adopted after that is of what is left."""
    desk = Desk(make)
    text = words(desk.num_blocks * desk.size)
    desk.leave(1, text)
    transaction = desk.manager.transaction()
    for one in (2, 3):
        transaction.acquire(one)
        transaction.extend(one, desk.size)
    left = len(text) - 2 * desk.size
    adopted = transaction.acquire(4, desk.key(text))
    expect(adopted <= left, f"at most {left} tokens adopted after 2 blocks were evicted", adopted)
    desk.slots.commit(transaction)
    for one in (2, 3):
        desk.slots.write(one, 0, words(desk.size, author=one))
    desk.expect_text(4, text[:adopted], "after the end of it was evicted in the same transaction")


def copies_come_before_what_overwrites_their_source(make: Make) -> None:
    """A beginning is adopted and extended, and what it came from is evicted by another, in one transaction."""
    desk = Desk(make)
    text = words(2 * desk.size)
    for same in range(1, len(text)):
        desk.manager.reset()
        desk.leave(1, text)
        mine = text[:same] + words(1, author=1)
        transaction = desk.manager.transaction()
        adopted = transaction.acquire(1, desk.key(mine, same))
        transaction.extend(1, len(mine))
        transaction.acquire(2)
        transaction.extend(2, transaction.free_blocks() * desk.size)
        desk.slots.commit(transaction)
        desk.slots.write(1, adopted, mine[adopted:])
        desk.slots.write(2, 0, words(len(desk.manager.block_table(2)) * desk.size, author=2))
        desk.expect_text(1, mine, f"after it adopted {adopted} tokens of a text that was evicted at once")
        for one in (1, 2):
            desk.release(one)


def cached_blocks_are_room(make: Make) -> None:
    """A pool full of cached texts takes the longest request, with and without its own text among them."""
    desk = Desk(make)
    most = desk.manager.max_request_tokens()
    for one in range(desk.num_blocks):
        desk.leave(one, words(desk.size, author=one))
    found = desk.manager.capacity()
    expect(found.cached_blocks == desk.num_blocks, f"all {desk.num_blocks} blocks cached", found)
    transaction = desk.manager.transaction()
    counts = transaction.free_blocks(), transaction.free_blocks(evict=False)
    transaction.rollback()
    expect(counts == (desk.num_blocks, 0), f"{desk.num_blocks} blocks to hand out, 0 without eviction", counts)
    found = desk.manager.max_request_tokens()
    expect(found == most, f"max_request_tokens = {most} still", found)
    for author, limit in ((50, 0), (50, most - 1), (50, most)):
        text = words(most, author)
        desk.start(1, text, desk.key(text, limit))
        desk.expect_text(1, text, f"in a full pool, of which it might adopt {limit}")
        desk.publish(1, text)
        desk.release(1)


def extension_without_eviction_keeps_the_cache(make: Make) -> None:
    """It takes what is free and no more; also where a write would need a copy of a cached block."""
    desk = Desk(make)
    text = words((desk.num_blocks - 1) * desk.size - desk.size // 2)
    desk.leave(1, text)
    known, free = desk.probe(text), desk.manager.capacity().free_blocks
    transaction = desk.manager.transaction()
    transaction.acquire(2)
    transaction.extend(2, free * desk.size, False)
    with expect_raises(KVExhausted, "for more than what is free, without eviction"):
        transaction.extend(2, free * desk.size + 1, False)
    transaction.acquire(3, desk.key(text, desk.size // 2))
    with expect_raises(KVExhausted, "for a first block when none is free, without eviction"):
        transaction.extend(3, desk.size + 1, False)
    transaction.release(3)
    desk.slots.commit(transaction)
    expect(desk.probe(text) == known, f"{known} tokens found after extensions without eviction", desk.probe(text))


def rollback_undoes_adoption_and_eviction(make: Make) -> None:
    desk = Desk(make)
    text, other = words(2 * desk.size), words(2 * desk.size, author=1)
    for one, left in ((1, text), (2, other)):
        desk.leave(one, left)
    before = desk.manager.capacity()
    transaction = desk.manager.transaction()
    transaction.acquire(1, desk.key(text))
    transaction.acquire(2)
    transaction.extend(2, transaction.free_blocks() * desk.size)
    transaction.rollback()
    expect(desk.manager.capacity() == before, f"{before} after a rollback", desk.manager.capacity())
    desk.manager.audit()
    for one, left in ((1, text), (2, other)):
        adopted = desk.start(one, left, desk.key(left))
        expect(adopted == len(left), f"{len(left)} tokens adopted after a rollback", adopted)
        desk.expect_text(one, left, "after a rollback")


def the_cache_changes_with_the_commit(make: Make) -> None:
    """Inside a transaction that evicts and releases, probes and classes are those of before."""
    desk = Desk(make)
    text, other = words(2 * desk.size), words(2 * desk.size, author=1)
    desk.leave(1, text)
    desk.start(2, other)
    desk.publish(2, other)
    before = desk.probe(text), desk.probe(other), desk.manager.capacity()
    transaction = desk.manager.transaction()
    transaction.release(2)
    transaction.acquire(3)
    transaction.extend(3, desk.num_blocks * desk.size)
    inside = desk.probe(text), desk.probe(other), desk.manager.capacity()
    desk.slots.commit(transaction)
    after = desk.probe(text), desk.probe(other), desk.manager.capacity().held_blocks
    expect(inside == before, f"{before} before the commit", inside)
    expect(after == (0, 0, desk.num_blocks), f"nothing found and {desk.num_blocks} blocks held after it", after)


def a_refused_extension_keeps_the_cache(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    desk.leave(1, text)
    before = desk.manager.capacity()
    transaction = desk.manager.transaction()
    transaction.acquire(2)
    with expect_raises(KVExhausted, "for more than the pool holds"):
        transaction.extend(2, (desk.num_blocks + 1) * desk.size)
    transaction.release(2)
    desk.slots.commit(transaction)
    expect(desk.manager.capacity() == before, f"{before} after a refusal", desk.manager.capacity())
    expect(desk.probe(text) == len(text), f"{len(text)} tokens found after a refusal", desk.probe(text))


def a_second_release_counts_nothing(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    desk.start(1, text)
    desk.publish(1, text)
    desk.release(1)
    before = desk.manager.capacity()
    transaction = desk.manager.transaction()
    with expect_raises(ValueError, "for the second release of a published sequence"):
        transaction.release(1)
    desk.slots.commit(transaction)
    expect(desk.manager.capacity() == before, f"{before} after a second release", desk.manager.capacity())


def publish_asks_for_stored_tokens(make: Make) -> None:
    """ValueError for a sequence without a table, and for more tokens than its table has room for."""
    desk = Desk(make)
    text = words(3 * desk.size)
    with expect_raises(ValueError, "for a sequence that has no table"):
        desk.publish(1, text)
    desk.start(1, text[: desk.size])
    with expect_raises(ValueError, "for tokens beyond the table"):
        desk.publish(1, text, desk.size + 1)
    expect(desk.probe(text) == 0, "nothing published by refused calls", desk.probe(text))


def transactions_shut_out_publish_and_reset(make: Make) -> None:
    desk = Desk(make)
    text = words(desk.size)
    desk.start(1, text)
    transaction = desk.manager.transaction()
    with expect_raises(RuntimeError, "for a publish inside a transaction"):
        desk.publish(1, text)
    with expect_raises(RuntimeError, "for a reset inside a transaction"):
        desk.manager.reset()
    transaction.rollback()
    desk.publish(1, text)
    desk.manager.reset()


def reset_forgets_everything(make: Make) -> None:
    """Running sequences keep their tables; what they publish afterwards may be out of date and is not found."""
    desk = Desk(make)
    text, other = words(2 * desk.size), words(2 * desk.size, author=1)
    desk.leave(1, text)
    desk.start(2, other)
    desk.publish(2, other)
    desk.manager.reset()
    found = desk.probe(text), desk.probe(other), desk.manager.capacity().cached_blocks
    expect(found == (0, 0, 0), "nothing found and nothing cached after a reset", found)
    desk.expect_text(2, other, "after a reset")
    desk.change(lambda kv: kv.fork(2, 3))
    for one in (2, 3):
        desk.publish(one, other)
        desk.release(one)
    expect(desk.probe(other) == 0, "nothing found of a sequence from before the reset", desk.probe(other))
    desk.leave(2, other)
    expect(desk.probe(other) == len(other), f"{len(other)} tokens of a new sequence", desk.probe(other))


def walks_keep_every_text(make: Make) -> None:
    """Random use, with forks and texts taken back: books add up and everybody reads his own tokens."""
    for seed in range(3):
        walk = PrefixWalk(Slots(make()), random.Random(seed))
        for _ in range(60):
            walk.step()
            walk.judge()


def classes_sum_to_total_with_a_cache(make: Make) -> None:
    walk = PrefixWalk(Slots(make()), random.Random(7))
    manager = walk.slots.manager
    for _ in range(100):
        walk.step()
        found = manager.capacity()
        held = len({block for one in walk.texts for block in manager.block_table(one)})
        expect(found.held_blocks == held, f"held_blocks = {held}, the distinct blocks in tables", found)
        total = found.free_blocks + found.held_blocks + found.cached_blocks
        expect(total == manager.layout.num_blocks, "free + held + cached = total", found)


ROOM_CHECKS = (
    eviction_forgets,
    ends_are_evicted_before_beginnings,
    held_blocks_are_never_evicted,
    adopted_blocks_are_not_evicted_by_their_own_transaction,
    what_a_transaction_evicts_it_does_not_adopt,
    copies_come_before_what_overwrites_their_source,
    cached_blocks_are_room,
    extension_without_eviction_keeps_the_cache,
    rollback_undoes_adoption_and_eviction,
    the_cache_changes_with_the_commit,
    a_refused_extension_keeps_the_cache,
    a_second_release_counts_nothing,
    publish_asks_for_stored_tokens,
    transactions_shut_out_publish_and_reset,
    reset_forgets_everything,
    walks_keep_every_text,
    classes_sum_to_total_with_a_cache,
)
