"""What both managers find, exactly: against the longest common beginning found by comparing every published text.

The authority is brute force; with room for everything nothing is evicted, so radix must find all of it and hash_prefix
all whole blocks of it, as the plain pool of the kit does.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pluglm.testing.block_kv import BlockKVConfig
from pluglm.testing.context import make_context
from pluglm.testing.kv_prefix_desk import Desk, words
from pluglm.testing.kv_prefix_walk import PrefixWalk, Text, common_length
from pluglm.testing.kv_sharing import Slots
from pluglm.testing.prefix_pool import PrefixPool
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
from pluglm_prefix_cache.radix import RadixKV

MANAGERS = [HashPrefixKV, RadixKV]


def manager(cls: Any, block_size: int, num_blocks: int = 4000) -> Any:
    return cls(cls.Config(block_size=block_size, num_blocks=num_blocks), make_context(kv_bytes=1 << 40))


def desk(cls: Any, block_size: int) -> Desk:
    return Desk(lambda: manager(cls, block_size))


def expected(cls: type, common: int, block_size: int) -> int:
    return common if cls is RadixKV else common // block_size * block_size


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
def test_every_length_around_block_borders(cls: type, block_size: int) -> None:
    """A text of every length, released; asked for with every limit, and with every longer and shorter prompt."""
    for length in range(3 * block_size + 2):
        bench = desk(cls, block_size)
        text = words(length)
        if length:
            bench.leave(1, text)
        for limit in range(length + 3):
            prompt = text + words(3, author=1)
            assert bench.probe(prompt, limit) == expected(cls, min(limit, length), block_size)
        for shorter in range(length):
            assert bench.probe(text[:shorter], shorter) == expected(cls, shorter, block_size)


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_texts_of_few_words_against_brute_force(cls: type, block_size: int, seed: int) -> None:
    bench, generator, texts = desk(cls, block_size), random.Random(seed), list[list[int]]()
    for one in range(120):
        earlier = generator.choice(texts) if texts else []
        text = earlier[: generator.randint(0, len(earlier))]
        text = [*text, *(generator.randint(0, 1) for _ in range(generator.randint(1, 3 * block_size)))]
        common = max((common_length(text, other) for other in texts), default=0)
        limit = generator.randint(0, len(text))
        assert bench.probe(text) == expected(cls, common, block_size)
        assert bench.start(one, text, bench.key(text, limit)) == expected(cls, min(common, limit), block_size)
        bench.expect_text(one, text, "after it adopted its beginning")
        bench.publish(one, text)
        bench.release(one)
        bench.manager.audit()
        texts.append(text)


class Logged(PrefixWalk):
    """Notes what every start adopted."""

    log: list[tuple[int, int]]

    def _start(self, transaction: Any) -> None:
        super()._start(transaction)
        started: Text | None = self.texts.get(self.next_id - 1)
        self.log.append((self.next_id - 1, -1 if started is None else started.num_computed))


@pytest.mark.parametrize("seed", range(6))
def test_hash_prefix_adopts_what_the_plain_pool_adopts(seed: int) -> None:
    """The same random use of both, with room for everything."""
    logs = []
    context = make_context(kv_bytes=4 * 4000 * 10, bytes_per_token=10)
    for kv in (manager(HashPrefixKV, 4), PrefixPool(BlockKVConfig(block_size=4), context)):
        walk = Logged(Slots(kv), random.Random(seed), with_forks=False)
        walk.log = []
        for _ in range(40):
            walk.step()
            walk.judge()
        logs.append(walk.log)
    assert logs[0] == logs[1]
    assert any(adopted > 9 for _, adopted in logs[0])


@pytest.mark.parametrize("cls", MANAGERS)
@pytest.mark.parametrize("seed", range(25))
def test_random_use_of_small_pools(cls: Any, seed: int) -> None:
    """Pools of 2 to 40 blocks under every eviction, with forks, texts taken back and resets."""
    generator = random.Random(seed)
    config = cls.Config(
        block_size=generator.choice([1, 2, 3, 4, 8]),
        num_blocks=generator.choice([2, 3, 5, 8, 16, 40]),
        eviction=generator.choice(["lru", "lfu", "longest_idle"]),
    )
    walk = PrefixWalk(Slots(cls(config, make_context(kv_bytes=1 << 40))), random.Random(seed))
    for _ in range(60):
        walk.step()
        walk.judge()
        if generator.random() < 0.02:
            walk.slots.manager.reset()  # type: ignore[attr-defined]
            walk.published.clear()
            walk.judge()
