"""The backend kit's checks of groups: the framework's backends pass them, and for every check a broken one fails it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.backends.cpu import CpuBackend
from pluglm.backends.fake import FakeBackend
from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kv.store import TensorKVStore
from pluglm.testing.backend import backend_checks
from pluglm.testing.backend_groups import CHECKS, backend_group_checks
from pluglm.testing.check import run_checks

CONTEXT = BackendContext(dtype="float32", deterministic=False, num_threads=1)
NAMES = {function.__name__ for function in CHECKS}


class OnePoolForAll(CpuBackend):
    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return super().allocate_kv(replace(layout, groups=()), spec)


class CopiesEverywhere(TensorKVStore):
    """Takes a pair for one of whatever layer has such blocks."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for group in self._groups:
            self._copy_blocks(group, [pair for pair in copies if max(pair) < group.num_blocks])


class CopiesInAllGroups(CpuBackend):
    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return CopiesEverywhere(layout, spec, "cpu", torch.float32)


class FirstTableForAll(CpuBackend):
    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: KVStore) -> torch.Tensor:
        groups = tuple(replace(group, segments=inputs.groups[0].segments) for group in inputs.groups)
        return super().execute(model, replace(inputs, groups=groups), attention, kv)


BROKEN: dict[str, type[CpuBackend]] = {
    "groups_have_pools_of_their_size": OnePoolForAll,
    "copies_stay_in_their_group": CopiesInAllGroups,
    "layers_read_through_the_tables_of_their_group": FirstTableForAll,
}


@pytest.mark.parametrize("backend", [CpuBackend, FakeBackend])
def test_the_frameworks_backends_pass(backend: type[Any]) -> None:
    report = run_checks(backend_group_checks(lambda: backend(backend.Config(), CONTEXT)))
    assert report.ok, str(report)


def test_only_who_provides_groups_is_checked_for_them() -> None:
    class Plain(CpuBackend):
        @classmethod
        def capabilities(cls, config: Any) -> Capabilities:
            return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    assert {check.name for check in backend_checks(CpuBackend)} >= NAMES
    assert not {check.name for check in backend_checks(Plain)} & NAMES


def test_every_check_has_a_broken_fixture() -> None:
    assert set(BROKEN) == NAMES


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails_its_check(name: str) -> None:
    report = run_checks(backend_group_checks(lambda: BROKEN[name](BROKEN[name].Config(), CONTEXT)))
    assert name in report.failed, str(report)
