"""The contract kit of evictions: ranks that can be compared, and that depend on the block's facts alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context

Make = Callable[[], Eviction]


def eviction_checks(cls: type[Any], config: Any = None, **context: Any) -> Iterator[Check]:
    """Every check of an eviction class. context: fields of the BuildContext to use instead of the kit's."""
    config = cls.Config() if config is None else config

    def make() -> Eviction:
        eviction: Eviction = cls(config, make_context(**context))
        return eviction

    yield from common_checks("eviction", cls, config, make)
    for function in (
        ranks_are_tuples_of_numbers,
        ranks_have_an_order,
        rank_depends_on_the_block_alone,
        two_objects_rank_alike,
    ):
        yield make_check(function, make)


def some_blocks(count: int = 200) -> list[CachedBlock]:
    """Facts as a manager would state them: cached, then used, then idle; the first and a very old one among them."""
    generator = random.Random(0)
    blocks = [CachedBlock(block=0, num_hits=0, num_before=0, cached_at=0, used_at=0, idle_since=0)]
    for block in range(1, count):
        times = sorted(generator.randrange(10**12 if block == 1 else 1000) for _ in range(3))
        blocks.append(
            CachedBlock(
                block=block,
                num_hits=generator.randrange(5),
                num_before=16 * generator.randrange(20),
                cached_at=times[0],
                used_at=times[1],
                idle_since=times[2],
            )
        )
    return blocks


def ranks_are_tuples_of_numbers(make: Make) -> None:
    eviction = make()
    for block in some_blocks():
        rank: object = eviction.rank(block)
        numbers = isinstance(rank, tuple) and all(isinstance(value, int | float) for value in rank)
        expect(numbers, f"a tuple of numbers for {block}", rank)


def ranks_have_an_order(make: Make) -> None:
    """NaN is neither before nor after anything."""
    eviction = make()
    for block in some_blocks():
        rank = eviction.rank(block)
        expect(all(value == value for value in rank), f"no NaN for {block}", rank)


def rank_depends_on_the_block_alone(make: Make) -> None:
    """Asked again, later and in another order, about the same facts."""
    eviction, blocks = make(), some_blocks()
    first = {block: eviction.rank(block) for block in blocks}
    for block in random.Random(1).sample(blocks, len(blocks)):
        again = eviction.rank(block)
        expect(again == first[block], f"{first[block]} again for {block}", again)


def two_objects_rank_alike(make: Make) -> None:
    first, second = make(), make()
    for block in some_blocks():
        ranks = first.rank(block), second.rank(block)
        expect(ranks[0] == ranks[1], f"one rank of {block} from objects of one config", ranks)
