"""The host tier at its limit: what was stored or loaded last stays, and the bytes are counted right."""

from __future__ import annotations

from pluglm.testing.context import make_context
from pluglm.testing.kv_tier import block, settled
from pluglm_prefix_cache.host_tier import HostTier, HostTierConfig

SIZE = 3 * 4 * 64 * 4  # of room for three blocks: four float32 tensors of 64 numbers each
IDS = 3 * 4 * 8  # and their token ids


def host_tier(num_bytes: int) -> HostTier:
    return HostTier(HostTierConfig(bytes=num_bytes), make_context())


def known(tier: HostTier) -> list[int]:
    return [number for number in range(9) if tier.has(block(number)[0])]


def test_the_longest_unused_goes_first() -> None:
    tier = host_tier(SIZE + IDS)
    for number in (1, 2, 3):
        tier.store(*block(number))
    assert settled(tier.load(*block(1)[:2])) == "ok"
    tier.store(*block(4))
    assert known(tier) == [1, 3, 4]
    tier.has(block(3)[0])
    tier.store(*block(5))
    assert known(tier) == [1, 4, 5], "asking is no use"


def test_a_byte_less_holds_a_block_less() -> None:
    tier = host_tier(SIZE + IDS - 1)
    for number in (1, 2, 3):
        tier.store(*block(number))
    assert known(tier) == [2, 3]


def test_what_is_larger_than_the_tier_fails_and_leaves_the_rest() -> None:
    tier = host_tier(SIZE + IDS)
    tier.store(*block(1))
    key, token_ids, data = block(2)
    assert settled(tier.store(key, token_ids, data * 4)) == "failed"
    assert known(tier) == [1]


def test_storing_again_counts_once() -> None:
    tier = host_tier(SIZE + IDS)
    for _ in range(5):
        tier.store(*block(1))
    for number in (2, 3):
        tier.store(*block(number))
    assert known(tier) == [1, 2, 3]
    tier.clear()
    for number in (4, 5, 6):
        tier.store(*block(number))
    assert known(tier) == [4, 5, 6]
