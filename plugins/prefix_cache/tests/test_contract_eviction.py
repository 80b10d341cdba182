"""The contract kit of evictions on each of ours."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.eviction import eviction_checks
from pluglm_prefix_cache.lfu import LfuEviction
from pluglm_prefix_cache.longest_idle import LongestIdleEviction
from pluglm_prefix_cache.lru import LruEviction


@pytest.mark.parametrize("check", **cases(eviction_checks(LruEviction)))
def test_lru(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(eviction_checks(LfuEviction)))
def test_lfu(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(eviction_checks(LongestIdleEviction)))
def test_longest_idle(check: Check) -> None:
    check.run()
