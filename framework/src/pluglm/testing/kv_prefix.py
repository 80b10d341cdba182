"""The part of the KV kit about prefix caches: what is found and adopted, and that it is what it says."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.kv_prefix_desk import Desk, Make, words
from pluglm.testing.kv_prefix_room import ROOM_CHECKS
from pluglm.testing.kv_prefix_walk import common_length


def prefix_checks(make: Make) -> Iterator[Check]:
    """Every check of the PrefixCache protocol. The pool must have 8 blocks, all of which one sequence may hold."""
    for function in (*CHECKS, *ROOM_CHECKS):
        yield make_check(function, make)


def published_blocks_are_found(make: Make) -> None:
    desk = Desk(make)
    text = words(3 * desk.size)
    desk.start(1, text)
    expect(desk.probe(text) == 0, "nothing found before it was published", desk.probe(text))
    desk.publish(1, text)
    expect(desk.probe(text) == len(text), f"all {len(text)} tokens found while their sequence runs", desk.probe(text))
    desk.release(1)
    expect(desk.probe(text) == len(text), f"all {len(text)} tokens found after its release", desk.probe(text))


def no_more_than_the_common_beginning_is_found(make: Make) -> None:
    """Texts that part at every place up to the third block."""
    desk = Desk(make)
    text = words(3 * desk.size)
    desk.leave(1, text)
    for same in range(len(text)):
        found = desk.probe(text[:same] + words(len(text) - same, author=1))
        expect(desk.whole(same) <= found <= same, f"{desk.whole(same)} to {same} of {same} common tokens", found)


def the_limit_holds_at_every_length(make: Make) -> None:
    """A text published whole is asked for with every limit, as a prompt whose last token must be computed is."""
    desk = Desk(make)
    text = words(2 * desk.size + 1)
    desk.leave(1, text)
    for limit in range(len(text) + 1):
        found = desk.probe(text, limit)
        expect(desk.whole(limit) <= found <= limit, f"{desk.whole(limit)} to {limit} tokens for limit {limit}", found)
        adopted = desk.start(2, text, desk.key(text, limit))
        expect(adopted == found, f"{found} tokens adopted, as the probe said", adopted)
        desk.expect_text(2, text, f"after it adopted {adopted}")
        desk.release(2)


def probing_changes_nothing(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    desk.leave(1, text)
    before = desk.manager.capacity()
    found = {desk.probe(text) for _ in range(3)} | {desk.probe(text, namespace=b"none") + len(text)}
    expect(found == {len(text)}, f"{len(text)} from every probe", found)
    expect(desk.manager.capacity() == before, f"{before} after probes", desk.manager.capacity())


def nothing_is_adopted_without_a_key(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    desk.leave(1, text)
    adopted = desk.start(9, text)
    expect(adopted == 0, "0 tokens without a key", adopted)


def namespaces_never_mix(make: Make) -> None:
    """Also not where one namespace begins like another, or is empty: their fields must not run together."""
    desk = Desk(make)
    text = words(2 * desk.size)
    names = [b"", b"a", b"aa", bytes(8), bytes(16), b"a" + bytes(7)]
    desk.leave(1, text, b"aa")
    for name in names:
        found, expected = desk.probe(text, namespace=name), len(text) if name == b"aa" else 0
        expect(found == expected, f"{expected} tokens in namespace {name!r}, published in b'aa'", found)


def adopters_diverge_without_a_trace(make: Make) -> None:
    """Whoever adopts a beginning writes other tokens after it, and a third still finds the first text."""
    desk = Desk(make)
    text = words(2 * desk.size + desk.size // 2)
    desk.leave(1, text)
    for one, same in enumerate(range(1, len(text)), start=2):
        other = text[:same] + words(2, author=one)
        desk.start(one, other, desk.key(other))
        desk.expect_text(one, other, "after its beginning was adopted")
        desk.release(one)
    desk.start(1, text, desk.key(text))
    desk.expect_text(1, text, "after others diverged from it")


def publishers_write_on_without_a_trace(make: Make) -> None:
    """A sequence is published, taken back to every length and goes on with other tokens; its old text stays cached."""
    desk = Desk(make)
    text = words(3 * desk.size)
    for kept in range(len(text)):
        desk.manager.reset()
        desk.start(1, text)
        desk.publish(1, text)
        other = text[:kept] + words(1, author=1)
        desk.change(lambda kv, n=kept: kv.trim(1, n), lambda kv, n=kept: kv.extend(1, n + 1))  # type: ignore[misc]
        desk.slots.write(1, kept, other[kept:])
        desk.expect_text(1, other, "after it was taken back and went on")
        desk.publish(1, other)
        desk.release(1)
        for wanted in (text, other):
            desk.start(2, wanted, desk.key(wanted))
            desk.expect_text(2, wanted, f"adopted from a text taken back to {kept} tokens")
            desk.release(2)


def forks_and_the_cache_share_blocks(make: Make) -> None:
    """Parent and child go different ways from a published beginning; all three texts can be read afterwards."""
    desk = Desk(make)
    text = words(desk.size + max(1, desk.size // 2))
    desk.start(1, text)
    desk.publish(1, text)
    desk.change(lambda kv: kv.fork(1, 2))
    for one in (2, 1):
        desk.change(lambda kv, one=one: kv.extend(one, len(text) + 1))  # type: ignore[misc]
        desk.slots.write(one, len(text), words(1, author=one))
        desk.publish(one, text + words(1, author=one))
    for one in (1, 2):
        desk.expect_text(one, text + words(1, author=one), "after a fork of a published sequence")
        desk.release(one)
    desk.start(3, text, desk.key(text))
    desk.expect_text(3, text, "after its forks are gone")


def equal_texts_may_be_published_side_by_side(make: Make) -> None:
    desk = Desk(make)
    text = words(2 * desk.size)
    for one in (1, 2):
        desk.start(one, text)
    for one in (1, 2, 1, 2):
        desk.publish(one, text)
        desk.manager.audit()
    for one in (1, 2):
        desk.expect_text(one, text, "after another published the same")
        desk.release(one)
    expect(desk.probe(text) == len(text), f"{len(text)} tokens found once", desk.probe(text))
    found = desk.manager.capacity()
    expect(found.cached_blocks == 2 and found.held_blocks == 0, "2 cached blocks and none held", found)


def all_that_was_published_is_found_while_there_is_room(make: Make) -> None:
    """Against the longest common beginning over every text, found by comparing with each."""
    desk, generator, texts = Desk(make), random.Random(8), list[list[int]]()
    for one in range(60):
        if desk.manager.capacity().free_blocks < 4:
            return
        earlier = generator.choice(texts) if texts else []
        text = earlier[: generator.randint(0, len(earlier))]
        text = [*text, *(generator.randint(0, 2) for _ in range(generator.randint(1, 2 * desk.size)))][: 3 * desk.size]
        common = max((common_length(text, other) for other in texts), default=0)
        adopted = desk.start(one, text, desk.key(text))
        least = desk.whole(common)
        expect(least <= adopted <= common, f"{least} to {common} tokens, the longest common beginning", adopted)
        desk.expect_text(one, text, f"after it adopted {adopted}")
        desk.publish(one, text)
        desk.release(one)
        texts.append(text)


CHECKS = (
    published_blocks_are_found,
    no_more_than_the_common_beginning_is_found,
    the_limit_holds_at_every_length,
    probing_changes_nothing,
    nothing_is_adopted_without_a_key,
    namespaces_never_mix,
    adopters_diverge_without_a_trace,
    publishers_write_on_without_a_trace,
    forks_and_the_cache_share_blocks,
    equal_texts_may_be_published_side_by_side,
    all_that_was_published_is_found_while_there_is_room,
)
