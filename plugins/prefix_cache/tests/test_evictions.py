"""Who goes first, by the definitions of the three evictions, and what comes of one that breaks its contract."""

from __future__ import annotations

from typing import Any

import pytest

from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction
from pluglm.testing.context import make_context, resolve_component
from pluglm.testing.kv_prefix_desk import Desk, words
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
from pluglm_prefix_cache.lfu import LfuEviction
from pluglm_prefix_cache.longest_idle import LongestIdleEviction
from pluglm_prefix_cache.lru import LruEviction
from pluglm_prefix_cache.radix import RadixKV

SIZE = 4
MANAGERS = [HashPrefixKV, RadixKV]


def desk(cls: Any, eviction: str | type[Eviction], num_blocks: int = 8) -> Desk:
    """eviction: an installed one's name, or a class."""

    def resolve(kind: str, name: str, options: Any) -> Any:
        return resolve_component(kind, name, options) if isinstance(eviction, str) else (eviction, ComponentConfig())

    context = make_context(kv_bytes=1 << 40, resolve_component=resolve)
    name = eviction if isinstance(eviction, str) else "mine"
    return Desk(lambda: cls(cls.Config(block_size=SIZE, num_blocks=num_blocks, eviction=name), context))


def order_of_eviction(bench: Desk, authors: list[int]) -> list[int]:
    """Cached texts of one block each, as others take room block by block."""
    order: list[int] = []
    for one in range(100, 100 + bench.num_blocks):
        bench.start(one, words(1, author=one))
        order += [a for a in authors if not bench.probe(words(SIZE, author=a)) and a not in order]
    return order


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize(
    ("eviction", "expected"),
    [
        ("lru", [2, 3, 1, 4]),  # 2 was published second, 3 third; 1 was adopted after that, 4 published last
        ("lfu", [2, 3, 4, 1]),  # only 1 was adopted; the others by their time of use
        ("longest_idle", [1, 3, 4, 2]),  # 2 was held longest, 1 was given back before 3 and 4
    ],
)
def test_order(cls: type, eviction: str, expected: list[int]) -> None:
    bench = desk(cls, eviction)
    texts = {author: words(SIZE, author=author) for author in (1, 2, 3, 4)}
    for author in (1, 2, 3):
        bench.start(author, texts[author])
        bench.publish(author, texts[author])
    bench.release(1)
    bench.start(1, texts[1], bench.key(texts[1]))
    bench.release(1)
    bench.release(3)
    bench.leave(4, texts[4])
    bench.release(2)
    assert order_of_eviction(bench, [1, 2, 3, 4]) == expected


@pytest.mark.parametrize(
    ("eviction", "rank"), [(LruEviction, (7.0,)), (LfuEviction, (3.0, 7.0)), (LongestIdleEviction, (9.0,))]
)
def test_ranks_are_the_facts_they_are_named_for(eviction: Any, rank: tuple[float, ...]) -> None:
    facts = CachedBlock(block=5, num_hits=3, num_before=64, cached_at=2, used_at=7, idle_since=9)
    assert eviction(ComponentConfig(), None).rank(facts) == rank


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize("eviction", ["lru", "lfu", "longest_idle"])
def test_a_failed_admission_is_no_use(cls: type, eviction: str) -> None:
    """An adoption that is given up in the same transaction, or rolled back, is no hit and no use, and ends no rest."""
    bench = desk(cls, eviction, num_blocks=4)
    texts = {author: words(SIZE, author=author) for author in (1, 2)}
    for author, text in texts.items():
        bench.leave(author, text)
    for end in ("release", "rollback"):
        transaction = bench.manager.transaction()
        transaction.acquire(9, bench.key(texts[1]))
        if end == "release":
            transaction.release(9)
            transaction.commit()
        else:
            transaction.rollback()
    assert order_of_eviction(bench, [1, 2]) == [1, 2]
    assert all(entry.num_hits == 0 for entry in bench.manager._cache.entries.values())


@pytest.mark.parametrize("cls", MANAGERS)
def test_publishing_the_same_again_is_a_use(cls: type) -> None:
    bench = desk(cls, "lru", num_blocks=4)
    for author in (1, 2, 1):
        bench.leave(author, words(SIZE, author=author))
    assert order_of_eviction(bench, [1, 2]) == [2, 1]


@pytest.mark.parametrize("cls", MANAGERS)
def test_who_is_released_now_has_not_been_idle(cls: type) -> None:
    """1 was published first, and is released in the very transaction that needs a block; 2 has been idle before."""
    bench = desk(cls, "longest_idle", num_blocks=2)
    texts = {author: words(SIZE, author=author) for author in (1, 2)}
    bench.start(1, texts[1])
    bench.publish(1, texts[1])
    bench.leave(2, texts[2])
    bench.change(lambda kv: kv.release(1), lambda kv: kv.acquire(3), lambda kv: kv.extend(3, 1))
    assert (bench.probe(texts[1]), bench.probe(texts[2])) == (SIZE, 0)


class Facts(Eviction):
    """Remembers what it was told."""

    interface_version = 1
    told: list[CachedBlock]

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.told = []

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        self.told.append(block)
        return (float(block.block),)


@pytest.mark.parametrize("cls", MANAGERS)
def test_only_ends_are_ranked_and_once(cls: type) -> None:
    """60 texts of 3 blocks: one rank each when room is first needed, then one for each block that becomes an end."""
    bench = desk(cls, Facts, num_blocks=180)
    told = bench.manager._cache.heap._eviction.told
    for one in range(60):
        bench.leave(one, words(3 * SIZE, author=one))
    assert told == []
    bench.start(100, words(1, author=100))
    assert len(told) <= 60 + 1
    for one in range(101, 121):
        before = len(told)
        bench.start(one, words(1, author=one))
        assert len(told) - before <= 2
    assert {block.num_before for block in told} <= {0, SIZE, 2 * SIZE}


@pytest.mark.parametrize("cls", MANAGERS)
def test_the_heap_does_not_grow_with_use(cls: type) -> None:
    """Block 7 is adopted again and again and never lowest, so its old items lie below; block 0 goes every time."""
    bench = desk(cls, Facts)
    for author in range(8):
        bench.start(author, words(SIZE, author=author))
    for author in range(8):
        bench.publish(author, words(SIZE, author=author))
        bench.release(author)
    last = words(SIZE, author=7)
    for one in range(100, 300):
        bench.start(one, last, bench.key(last))
        bench.release(one)
        bench.leave(one, words(SIZE, author=one))
    assert len(bench.manager._cache.heap.items) <= 2 * 8 + 64 + 1
    assert bench.probe(last) == SIZE
    bench.manager.audit()


@pytest.mark.parametrize("cls", MANAGERS)
def test_what_was_evicted_is_not_looked_at_again(cls: type) -> None:
    """100 texts go one after the other: each time the heap is left with those that are still cached."""
    bench = desk(cls, "lru", num_blocks=100)
    for author in range(100):
        bench.leave(author, words(SIZE, author=author))
    for one in range(200, 300):
        bench.start(one, words(1, author=one))
        assert len(bench.manager._cache.heap.items) <= bench.manager.capacity().cached_blocks + 1


class Nan(Facts):
    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float("nan"),)


class Fails(Facts):
    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        raise ZeroDivisionError("no hits")


class Words(Facts):
    def rank(self, block: CachedBlock) -> Any:
        return ("oldest",)


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize(
    ("eviction", "reason"),
    [(Nan, "NaN has no order"), (Fails, "ZeroDivisionError: no hits"), (Words, "could not convert")],
)
def test_a_broken_eviction_is_named_and_costs_nothing(cls: type, eviction: Any, reason: str) -> None:
    bench = desk(cls, eviction)
    text = words(8 * SIZE)
    bench.leave(1, text)
    before = bench.manager.capacity()
    transaction = bench.manager.transaction()
    transaction.acquire(2)
    with pytest.raises(ComponentFailure, match=rf"eviction 'mine' .*{reason}"):
        transaction.extend(2, SIZE)
    transaction.rollback()
    bench.manager.audit()
    assert bench.manager.capacity() == before
    assert bench.probe(text) == len(text)
