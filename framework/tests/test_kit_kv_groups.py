"""The kit of KV managers with groups is tested: the framework's passes, and for every check a broken one fails it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pluglm.kernel.core import BlockCopies
from pluglm.kernel.interfaces.kv import GroupTable, KVLayout
from pluglm.kv.books import Table
from pluglm.kv.group_transaction import PooledTransaction
from pluglm.kv.pool_kinds import PoolKind
from pluglm.kv.pool_transaction import PoolTransaction
from pluglm.kv.pools import Extent, Pools
from pluglm.kv.window_paged import WindowPagedKV
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.kv import kv_checks
from pluglm.testing.kv_groups import CHECKS, group_checks


def broken(**methods: Any) -> type[WindowPagedKV]:
    """WindowPagedKV with other methods in its transactions."""
    made = type("BrokenTransaction", (PooledTransaction,), methods)

    class BrokenKV(WindowPagedKV):
        def transaction(self) -> PooledTransaction:
            super().transaction().rollback()
            found: PooledTransaction = made(self._pools, self._closed)
            self._is_open = True
            return found

    return BrokenKV


def with_kinds(change: Any) -> type[WindowPagedKV]:
    """WindowPagedKV that treats its layers as other kinds than its layout says."""

    class BrokenKV(WindowPagedKV):
        def __init__(self, config: Any, context: Any) -> None:
            super().__init__(config, context)
            pools = tuple(replace(pool, kind=change(pool.kind)) for pool in self._pools.pools)
            self._pools = Pools(pools, self._pools.max_tokens)

    return BrokenKV


class ForgetsALayer(WindowPagedKV):
    @property
    def layout(self) -> KVLayout:
        layout = super().layout
        first, *others = layout.groups
        return replace(layout, groups=(replace(first, layers=first.layers[:1]), *others))


class NumbersAsTheLayout(WindowPagedKV):
    def group_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        tables = zip(super().group_tables(sequence_id), self._pools.pools, strict=True)
        return tuple(
            table._replace(blocks=tuple(pool.first_block + one for one in table.blocks)) for table, pool in tables
        )


def drops_what_is_extended(self: PooledTransaction, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
    PooledTransaction.extend(self, sequence_id, num_tokens, evict)
    self.advance(sequence_id, num_tokens)


def quarter_of_the_window(kind: PoolKind) -> PoolKind:
    return kind if kind.window is None else replace(kind, window=kind.window // 4)


class DropsNothing(PoolKind):
    span_blocks = None

    def num_dropped(self, num_computed: int | None) -> int:
        return 0


def dropping_nothing(kind: PoolKind) -> PoolKind:
    return DropsNothing(**{name: getattr(kind, name) for name in PoolKind.__dataclass_fields__})


class TakesBlocksAsTheyAreNeeded(PoolTransaction):
    def wanted(self, table: Table, extent: Extent) -> int:
        found = super().wanted(table, extent)
        if extent.num_computed is None or self.kind.window is None:
            return found
        return min(found, extent.num_computed + self.kind.max_step_tokens - self.kind.num_dropped(extent.num_computed))


def makes_other_parts(self: PooledTransaction, pools: Pools, close: Any) -> None:
    PooledTransaction.__init__(self, pools, close)
    self._parts = [TakesBlocksAsTheyAreNeeded(pool) for pool in pools.pools]


def goes_back(self: PooledTransaction, sequence_id: int, num_tokens: int) -> None:
    """Nothing is refused."""


def extends_one_after_another(self: PooledTransaction, sequence_id: int, extent: Extent) -> None:
    for part in self._parts:
        part.extend(sequence_id, part.need(sequence_id, extent)[0])
    self._extents[sequence_id] = extent


def commits_on_rollback(self: PooledTransaction) -> None:
    self.commit()


def numbers_copies_by_pool(self: PooledTransaction) -> BlockCopies:
    firsts = [part.first_block for part in self._parts]
    copies = PooledTransaction.commit(self)
    return tuple((source - base, target - base) for source, target in copies for base in [_base(firsts, source)])


def _base(firsts: list[int], block: int) -> int:
    return max(first for first in firsts if first <= block)


BROKEN: dict[str, type[WindowPagedKV]] = {
    "groups_divide_the_layers": ForgetsALayer,
    "tables_have_the_blocks_of_their_group": NumbersAsTheLayout,
    "nothing_is_dropped_before_it_advances": broken(extend=drops_what_is_extended),
    "only_unseen_tokens_are_dropped": with_kinds(quarter_of_the_window),
    "a_promise_is_kept_in_a_full_pool": broken(__init__=makes_other_parts),
    "what_a_window_leaves_serves_others": with_kinds(dropping_nothing),
    "going_back_is_refused": broken(_require_kept=goes_back),
    "exhaustion_in_one_group_changes_no_other": broken(_fill=extends_one_after_another),
    "an_advance_can_be_rolled_back": broken(rollback=commits_on_rollback),
    "advancing_walk_keeps_what_is_seen": broken(commit=numbers_copies_by_pool),
}


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64, 100])
def test_the_frameworks_manager_passes(block_size: int) -> None:
    report = run_checks(group_checks(WindowPagedKV, WindowPagedKV.Config(block_size=block_size)))
    assert report.ok, str(report)


def test_the_kit_of_kv_managers_includes_them() -> None:
    names = {check.name for check in kv_checks(WindowPagedKV)}
    assert {function.__name__ for function in CHECKS} < names - COMMON


def test_every_group_check_has_a_broken_fixture() -> None:
    assert [function.__name__ for function in CHECKS] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manager_fails_its_check(name: str) -> None:
    report = run_checks(group_checks(BROKEN[name], WindowPagedKV.Config()))
    assert name in report.failed, str(report)
