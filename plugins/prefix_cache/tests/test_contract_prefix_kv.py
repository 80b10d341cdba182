"""The contract kit of KV managers on hash_prefix and radix, with blocks of several sizes and every eviction."""

from __future__ import annotations

import pytest

from pluglm.kernel.config import Slot
from pluglm.testing.check import Check, cases
from pluglm.testing.kv import kv_checks
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
from pluglm_prefix_cache.radix import RadixKV


@pytest.mark.parametrize("check", **cases(kv_checks(HashPrefixKV)))
def test_hash_prefix(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(kv_checks(RadixKV)))
def test_radix(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("cls", [HashPrefixKV, RadixKV])
@pytest.mark.parametrize(("block_size", "eviction"), [(1, "lfu"), (3, "longest_idle"), (4, "lru"), (24, "lfu")])
def test_other_block_sizes_and_evictions(cls: type, block_size: int, eviction: str) -> None:
    for check in kv_checks(cls, cls.Config(block_size=block_size, eviction=Slot(use=eviction))):  # type: ignore[attr-defined]
        check.run()
