"""The kit of KV tiers is tested: a plain one passes, and for every check one broken tier fails only that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kv_tier import KVTier, Lease, LeaseState
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.kv_tier import kv_tier_checks

Tensors = Sequence[torch.Tensor]


class DoneLease:
    seconds = 0.0

    def __init__(self, state: LeaseState, data: Tensors = ()) -> None:
        self.state, self.data = state, data

    def wait(self, timeout_s: float) -> LeaseState:
        return self.state

    def cancel(self) -> None:
        """It is over."""


class PlainTier(KVTier):
    interface_version = 1

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self.blocks: dict[bytes, tuple[tuple[int, ...], Tensors]] = {}

    def has(self, key: bytes) -> bool:
        return key in self.blocks

    def store(self, key: bytes, token_ids: Sequence[int], data: Tensors) -> Lease:
        self.blocks[key] = (tuple(token_ids), list(data))
        return DoneLease("ok")

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        known, data = self.blocks.get(key, (None, ()))
        return DoneLease("ok", data) if known == tuple(token_ids) else DoneLease("failed")

    def clear(self) -> None:
        self.blocks.clear()

    def close(self) -> None:
        """Nothing is open."""


class Halves(PlainTier):
    """Keeps bfloat16 as float16."""

    def store(self, key: bytes, token_ids: Sequence[int], data: Tensors) -> Lease:
        return super().store(key, token_ids, [one.half() if one.dtype == torch.bfloat16 else one for one in data])


class Inventive(PlainTier):
    """Makes up what it never saw."""

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.seen: set[bytes] = set()

    def store(self, key: bytes, token_ids: Sequence[int], data: Tensors) -> Lease:
        self.seen.add(key)
        return super().store(key, token_ids, data)

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        return super().load(key, token_ids) if key in self.seen else DoneLease("ok", [torch.zeros(1)])


class Trusting(PlainTier):
    """Compares the number of tokens alone."""

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        known, data = self.blocks.get(key, ((), ()))
        return DoneLease("ok", data) if known and len(known) == len(token_ids) else DoneLease("failed")


class Stubborn(PlainTier):
    """Keeps what it had first."""

    def store(self, key: bytes, token_ids: Sequence[int], data: Tensors) -> Lease:
        return DoneLease("ok") if key in self.blocks else super().store(key, token_ids, data)


class Suggestible(PlainTier):
    """Believes to have what it was asked for before."""

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.asked: set[bytes] = set()

    def has(self, key: bytes) -> bool:
        found = super().has(key) or key in self.asked
        self.asked.add(key)
        return found


class LiveLease(DoneLease):
    """Looks into the tier whenever it is asked."""

    def __init__(self, tier: PlainTier, key: bytes, data: Tensors) -> None:
        super().__init__("ok", data)
        self.tier, self.key = tier, key

    def wait(self, timeout_s: float) -> LeaseState:
        return "ok" if self.key in self.tier.blocks else "failed"


class Lively(PlainTier):
    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        lease = super().load(key, token_ids)
        return LiveLease(self, key, lease.data) if lease.wait(0.0) == "ok" else lease


class TakingLease(LiveLease):
    """Takes the block with it."""

    def wait(self, timeout_s: float) -> LeaseState:
        return "ok"

    def cancel(self) -> None:
        self.tier.blocks.pop(self.key, None)


class Touchy(PlainTier):
    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        lease = super().load(key, token_ids)
        return TakingLease(self, key, lease.data) if lease.wait(0.0) == "ok" else lease


class Unforgetting(PlainTier):
    def clear(self) -> None:
        """Keeps everything."""


class Overwriting(PlainTier):
    """Of more than a hundred blocks, the first one loses its first tensor."""

    def store(self, key: bytes, token_ids: Sequence[int], data: Tensors) -> Lease:
        if len(self.blocks) > 100:
            next(iter(self.blocks.values()))[1][0].zero_()
        return super().store(key, token_ids, data)


BROKEN: dict[str, type[PlainTier]] = {
    "blocks_come_back_bit_for_bit": Halves,
    "unknown_blocks_fail": Inventive,
    "other_tokens_fail": Trusting,
    "storing_again_replaces": Stubborn,
    "asking_changes_nothing": Suggestible,
    "leases_stay_as_they_are": Lively,
    "cancelled_leases_do_no_harm": Touchy,
    "clear_forgets_everything": Unforgetting,
    "what_goes_is_gone_whole": Overwriting,
}


def test_a_plain_tier_passes() -> None:
    report = run_checks(kv_tier_checks(PlainTier))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in kv_tier_checks(PlainTier)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tier_fails_exactly_its_check(name: str) -> None:
    report = run_checks(kv_tier_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
