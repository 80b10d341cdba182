"""The contract kit of KV tiers: what is stored comes back bit for bit, or not at all, whatever is asked when."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pluglm.kernel.interfaces.kv_tier import KVTier, Lease, LeaseState
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context

Make = Callable[[], KVTier]
PATIENCE_S = 30.0  # after which a transfer counts as stuck; none of the checks needs to wait that long
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def kv_tier_checks(
    cls: type[Any], config: Any = None, *, fresh_config: Callable[[], Any] | None = None, **context: Any
) -> Iterator[Check]:
    """Every check of a tier class. It must take a few blocks of 1 KiB.

    fresh_config: a config whose tier is empty, for tiers that keep blocks from one object to the next; by default every
    object is built from `config`. context: fields of the BuildContext to use instead of the kit's.
    """
    config = config if config is not None else fresh_config() if fresh_config is not None else cls.Config()

    def make() -> KVTier:
        tier: KVTier = cls(config if fresh_config is None else fresh_config(), make_context(**context))
        return tier

    yield from common_checks("kv_tier", cls, config, make)
    for function in CHECKS:
        yield make_check(function, make)


@contextmanager
def opened(make: Make) -> Iterator[KVTier]:
    tier = make()
    try:
        yield tier
    finally:
        tier.close()


def block(number: int, dtype: torch.dtype = torch.float32) -> tuple[bytes, tuple[int, ...], list[torch.Tensor]]:
    """Key, tokens and tensors of two layers, [4, 2, 8] each; numbers of any size are different blocks."""
    key = hashlib.blake2b(str((number, dtype)).encode(), digest_size=32).digest()
    generator = torch.Generator().manual_seed(number)
    data = [torch.randint(-99, 99, (4, 2, 8), generator=generator).to(dtype) for _ in range(4)]
    return key, tuple(range(number, number + 4)), data


def settled(lease: Lease) -> LeaseState:
    """Its state at the end, waited for in small steps."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (state := lease.wait(0.01)) == "pending":
        expect(time.monotonic() < deadline_s, f"a transfer that is over within {PATIENCE_S:g} s", "a pending one")
    return state


def stored(tier: KVTier, number: int, dtype: torch.dtype = torch.float32) -> None:
    state = settled(tier.store(*block(number, dtype)))
    expect(state == "ok", f"block {number} stored", state)


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    pairs = list(zip(found, wanted, strict=False))
    return len(found) == len(wanted) and all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)


def blocks_come_back_bit_for_bit(make: Make) -> None:
    with opened(make) as tier:
        for number, dtype in enumerate(DTYPES):
            stored(tier, number, dtype)
        for number, dtype in enumerate(DTYPES):
            key, token_ids, data = block(number, dtype)
            expect(tier.has(key) is True, f"has() of a stored block of {dtype}", tier.has(key))
            lease = tier.load(key, token_ids)
            state = settled(lease)
            expect(state == "ok", f"a block of {dtype} loaded", state)
            expect(same(lease.data, data), f"the same bits of {dtype}", "others")
            expect(lease.seconds >= 0, "the seconds that it took", lease.seconds)


def unknown_blocks_fail(make: Make) -> None:
    with opened(make) as tier:
        stored(tier, 1)
        key, token_ids, _ = block(2)
        expect(tier.has(key) is False, "has() False for what was never stored", tier.has(key))
        state = settled(tier.load(key, token_ids))
        expect(state == "failed", "a failed load of what was never stored", state)


def other_tokens_fail(make: Make) -> None:
    """Of a collision of keys, and of a block of the same tokens behind others."""
    with opened(make) as tier:
        stored(tier, 1)
        key, token_ids, _ = block(1)
        for other in (block(2)[1], token_ids[:-1], (7, *token_ids), ()):
            state = settled(tier.load(key, other))
            expect(state == "failed", f"a failed load of a key with tokens {other}", state)
        expect(settled(tier.load(key, token_ids)) == "ok", "the block still there for its own tokens", "a failed load")


def storing_again_replaces(make: Make) -> None:
    with opened(make) as tier:
        key, token_ids, _ = block(1)
        _, _, other = block(2)
        stored(tier, 1)
        expect(settled(tier.store(key, token_ids, other)) == "ok", "a block stored again", "a failed store")
        lease = tier.load(key, token_ids)
        expect(settled(lease) == "ok" and same(lease.data, other), "what was stored last", "something else")


def asking_changes_nothing(make: Make) -> None:
    with opened(make) as tier:
        stored(tier, 1)
        for number in range(50):
            tier.has(block(number)[0])
        answers = [tier.has(block(number)[0]) for number in range(50)]
        expect(answers == [number == 1 for number in range(50)], "has() true of the stored block alone", answers)
        lease = tier.load(*block(1)[:2])
        expect(settled(lease) == "ok" and same(lease.data, block(1)[2]), "the block as before", "something else")


def leases_stay_as_they_are(make: Make) -> None:
    """A state is asked for again, and data is still the caller's when the tier has forgotten the block."""
    with opened(make) as tier:
        stored(tier, 1)
        key, token_ids, data = block(1)
        good, bad = tier.load(key, token_ids), tier.load(key, ())
        states = [settled(good), settled(bad), good.wait(0.0), bad.wait(0.0)]
        tier.clear()
        states += [good.wait(0.0), bad.wait(0.0)]
        expect(states == ["ok", "failed"] * 3, "states that do not change any more", states)
        expect(same(good.data, data), "the data of a lease that was ok before", "something else")


def cancelled_leases_do_no_harm(make: Make) -> None:
    """At once, when they are over, and twice."""
    with opened(make) as tier:
        for number in range(8):
            lease = tier.store(*block(number))
            lease.cancel()
        stored(tier, 1)
        for _ in range(8):
            tier.load(*block(1)[:2]).cancel()
        lease = tier.load(*block(1)[:2])
        expect(settled(lease) == "ok" and same(lease.data, block(1)[2]), "a load beside cancelled ones", "another end")
        lease.cancel()
        lease.cancel()
        expect(settled(tier.load(*block(1)[:2])) == "ok", "the block there after its lease was cancelled", "a miss")


def clear_forgets_everything(make: Make) -> None:
    with opened(make) as tier:
        for number in range(4):
            stored(tier, number)
        tier.clear()
        for number in range(4):
            key, token_ids, _ = block(number)
            state = "has it" if tier.has(key) else settled(tier.load(key, token_ids))
            expect(state == "failed", "no block left after clear()", state)
        stored(tier, 5)


def what_goes_is_gone_whole(make: Make) -> None:
    """Far more than any limit of a small tier: each block is there as it was, or a miss."""
    with opened(make) as tier:
        for number in range(300):
            state = settled(tier.store(*block(number)))
            expect(state in ("ok", "failed"), "a store that ends", state)
        for number in range(300):
            key, token_ids, data = block(number)
            lease = tier.load(key, token_ids)
            if settled(lease) == "ok":
                expect(same(lease.data, data), f"block {number} as it was stored", "something else")


CHECKS: tuple[Callable[[Make], None], ...] = (
    blocks_come_back_bit_for_bit,
    unknown_blocks_fail,
    other_tokens_fail,
    storing_again_replaces,
    asking_changes_nothing,
    leases_stay_as_they_are,
    cancelled_leases_do_no_harm,
    clear_forgets_everything,
    what_goes_is_gone_whole,
)
