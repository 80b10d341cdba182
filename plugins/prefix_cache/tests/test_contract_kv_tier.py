"""The built-in KV tiers keep their contract, with room for all and with next to none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pluglm.testing import Check, cases, kit
from pluglm_prefix_cache.disk_tier import DiskTier, DiskTierConfig
from pluglm_prefix_cache.host_tier import HostTier, HostTierConfig

KIT = kit("kv_tier")


@pytest.mark.parametrize("check", **cases(KIT(HostTier)))
def test_host(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(KIT(HostTier, HostTierConfig(bytes=8000))))
def test_small_host(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("number_of_bytes", [1 << 30, 20_000], ids=["roomy", "small"])
def test_disk(tmp_path: Path, number_of_bytes: int) -> None:
    numbers = itertools.count()

    def fresh_config() -> DiskTierConfig:
        return DiskTierConfig(path=tmp_path / f"tier-{next(numbers)}", bytes=number_of_bytes)

    for check in KIT(DiskTier, fresh_config=fresh_config):
        check.run()
