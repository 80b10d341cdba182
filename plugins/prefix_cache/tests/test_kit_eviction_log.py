"""The checks of eviction logs are tested: for every one a broken manager fails only that."""

from __future__ import annotations

from typing import Any

import pytest

from pluglm.kernel.interfaces.kv import EvictedBlock
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.kv import kv_checks
from pluglm.testing.kv_eviction_log import eviction_log_checks
from pluglm_prefix_cache.hash_prefix import HashPrefixKV


class Repeats(HashPrefixKV):
    """Says the last block twice."""

    def take_evicted(self) -> list[EvictedBlock]:
        taken = super().take_evicted()
        return [*taken, *taken[-1:]]


class AlwaysListens(HashPrefixKV):
    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        super().take_evicted()


class SaysEarly(HashPrefixKV):
    """Says what a transaction would have evicted, whatever became of it."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.early: list[EvictedBlock] = []

    def transaction(self) -> Any:
        transaction: Any = super().transaction()
        roll_back = transaction.rollback

        def rollback() -> None:
            self.early += [EvictedBlock(block, b"", ()) for block in transaction._evicted]
            roll_back()

        transaction.rollback = rollback
        return transaction

    def take_evicted(self) -> list[EvictedBlock]:
        early, self.early = self.early, []
        return [*early, *super().take_evicted()]


class Remembers(HashPrefixKV):
    """Over a reset."""

    def reset(self) -> None:
        evicted = self._cache.evicted
        super().reset()
        self._cache.evicted = evicted


BROKEN: dict[str, type[HashPrefixKV]] = {
    "evicted_blocks_are_said_once_with_their_content": Repeats,
    "nothing_is_kept_before_somebody_asks": AlwaysListens,
    "what_is_rolled_back_is_not_said": SaysEarly,
    "a_reset_forgets_what_was_evicted": Remembers,
}


def test_the_kit_of_managers_asks_for_it() -> None:
    names = {check.name for check in kv_checks(HashPrefixKV)}
    assert set(BROKEN) <= names - COMMON
    assert {check.name for check in eviction_log_checks(lambda: None)} == set(BROKEN)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_log_fails_exactly_its_check(name: str) -> None:
    report = run_checks(kv_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
