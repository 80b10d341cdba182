"""The backend kit's checks of KV formats: the CPU backend passes, and for every check a broken one fails exactly it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pluglm.backends.cpu import CpuBackend
from pluglm.backends.fake import FakeBackend
from pluglm.backends.scratch_store import ScratchKVStore
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kv.store import TensorKVStore
from pluglm.testing.backend import backend_checks
from pluglm.testing.backend_formats import FORMAT_CHECKS, backend_format_checks
from pluglm.testing.check import run_checks

CONTEXT = BackendContext(dtype="float32", deterministic=False, num_threads=1)
NAMES = {function.__name__ for function in FORMAT_CHECKS}


class ScratchBackend(CpuBackend):
    """With the store that graphs need."""

    def allocate_encoded_kv(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat) -> KVStore:
        return ScratchKVStore(layout, spec, "cpu", torch.float32, kv_format)


class SwapsKeysAndValues(TensorKVStore):
    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        keys, values, *scales = super().parts(layer)
        return (values, keys, *scales)


class CopiesCodesAlone(TensorKVStore):
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        before = [tuple(one.clone() for one in parts) for parts in self._parts]
        super().copy_blocks(copies)
        for parts, old in zip(self._parts, before, strict=True):
            for part, scales in zip(parts[2:], old[2:], strict=True):
                part.copy_(scales)


def stores_in(store: type[TensorKVStore]) -> type[CpuBackend]:
    class Broken(CpuBackend):
        def allocate_encoded_kv(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat) -> KVStore:
            return store(layout, spec, "cpu", torch.float32, kv_format=kv_format)

    return Broken


BROKEN: dict[str, type[CpuBackend]] = {
    "stores_have_what_the_format_stores": stores_in(SwapsKeysAndValues),
    "copies_move_every_part": stores_in(CopiesCodesAlone),
}


def checks(cls: type[Any]) -> Any:
    return backend_format_checks(lambda: cls(cls.Config(), CONTEXT))


@pytest.mark.parametrize("cls", [CpuBackend, ScratchBackend])
def test_the_frameworks_stores_pass(cls: type[Any]) -> None:
    report = run_checks(checks(cls))
    assert report.ok, str(report)


def test_only_who_computes_with_what_it_stores_is_checked() -> None:
    assert {check.name for check in backend_checks(CpuBackend)} >= NAMES
    assert not {check.name for check in backend_checks(FakeBackend)} & NAMES


def test_every_check_has_a_broken_fixture() -> None:
    assert set(BROKEN) == NAMES


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails_exactly_its_check(name: str) -> None:
    report = run_checks(checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
