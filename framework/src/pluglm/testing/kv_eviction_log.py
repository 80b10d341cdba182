"""The part of the KV kit about eviction logs: what is evicted is said once, with what its block still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.kv_prefix_desk import SPACE, Desk, Make, words


def eviction_log_checks(make: Make) -> Iterator[Check]:
    """Every check of the EvictionLog protocol. The pool must have 8 blocks, all of which one sequence may hold."""
    for function in CHECKS:
        yield make_check(function, make)


def full_desk(make: Make, listens: bool = True) -> tuple[Desk, list[list[int]]]:
    """A pool full of cached texts of two blocks and a half, and the texts."""
    desk = Desk(make)
    if listens:
        desk.manager.take_evicted()
    texts = [words(2 * desk.size + desk.size // 2, author) for author in range(desk.num_blocks // 3)]
    for one, text in enumerate(texts):
        desk.leave(one, text)
    return desk, texts


def push_out(desk: Desk) -> None:
    """One sequence that takes the whole pool."""
    desk.change(lambda kv: kv.acquire(900), lambda kv: kv.extend(900, desk.num_blocks * desk.size))


def evicted_blocks_are_said_once_with_their_content(make: Make) -> None:
    desk, texts = full_desk(make)
    said = list(desk.manager.take_evicted())
    expect(not said, "nothing said while there is room", said)
    for one in range(500, 500 + desk.num_blocks // 2):
        found, held = [desk.whole(desk.probe(text)) for text in texts], dict(desk.slots.held)
        desk.change(lambda kv, n=one: kv.acquire(n), lambda kv, n=one: kv.extend(n, 2 * desk.size))  # type: ignore[misc]
        said = list(desk.manager.take_evicted())
        gone = [
            tuple(text[:end])
            for text, before in zip(texts, found, strict=True)
            for end in range(desk.whole(desk.probe(text)) + desk.size, before + 1, desk.size)
        ]
        expect(sorted(block.token_ids for block in said) == sorted(gone), f"{gone} said to be evicted", said)
        for block in said:
            start = block.block * desk.size
            content = tuple(held.get(slot, -1) for slot in range(start, start + desk.size))
            expect(content == block.token_ids[-desk.size :], f"{block} with that content", content)
            expect(block.namespace == SPACE, f"namespace {SPACE!r}", block.namespace)
        desk.slots.write(one, 0, words(2 * desk.size, one))
    expect(not any(map(desk.probe, texts)), "all texts pushed out", [desk.probe(text) for text in texts])


def nothing_is_kept_before_somebody_asks(make: Make) -> None:
    """Where nobody ever does, the log must not grow."""
    desk, _ = full_desk(make, listens=False)
    push_out(desk)
    said = list(desk.manager.take_evicted())
    expect(not said, "nothing from before the first call", said)


def what_is_rolled_back_is_not_said(make: Make) -> None:
    desk, texts = full_desk(make)
    found = [desk.probe(text) for text in texts]
    transaction = desk.manager.transaction()
    transaction.acquire(900)
    transaction.extend(900, desk.num_blocks * desk.size)
    transaction.rollback()
    said = list(desk.manager.take_evicted())
    expect(not said and [desk.probe(text) for text in texts] == found, "nothing evicted by a rollback", said)


def a_reset_forgets_what_was_evicted(make: Make) -> None:
    """And evicts nothing itself: what it drops must not be used again."""
    desk, _ = full_desk(make)
    push_out(desk)
    desk.manager.reset()
    said = list(desk.manager.take_evicted())
    expect(not said, "nothing said over a reset", said)
    desk.release(900)
    desk.leave(1, words(2 * desk.size))
    desk.manager.reset()
    said = list(desk.manager.take_evicted())
    expect(not said, "nothing said of what a reset dropped", said)


CHECKS: tuple[Callable[[Make], None], ...] = (
    evicted_blocks_are_said_once_with_their_content,
    nothing_is_kept_before_somebody_asks,
    what_is_rolled_back_is_not_said,
    a_reset_forgets_what_was_evicted,
)
