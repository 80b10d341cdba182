"""The kit of evictions is tested: a plain one passes, and for every check one broken eviction fails only that."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.eviction import eviction_checks


class OldestFirst(Eviction):
    interface_version = 1

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        pass

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float(block.cached_at),)


class NamesThem(OldestFirst):
    def rank(self, block: CachedBlock) -> Any:
        return ("first",) if block.num_hits == 0 else ("later",)


class DividesByHits(OldestFirst):
    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (block.used_at / block.num_hits if block.num_hits else math.nan,)


class CountsQuestions(OldestFirst):
    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self._questions = itertools.count()

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float(next(self._questions)),) if block.num_hits == 4 else super().rank(block)


class CountsObjects(OldestFirst):
    made = itertools.count()

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        self._number = next(self.made)

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float(self._number), float(block.used_at))


BROKEN: dict[str, type[OldestFirst]] = {
    "ranks_are_tuples_of_numbers": NamesThem,
    "ranks_have_an_order": DividesByHits,
    "rank_depends_on_the_block_alone": CountsQuestions,
    "two_objects_rank_alike": CountsObjects,
}


def test_a_plain_eviction_passes() -> None:
    report = run_checks(eviction_checks(OldestFirst))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in eviction_checks(OldestFirst)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_eviction_fails_exactly_its_check(name: str) -> None:
    report = run_checks(eviction_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
