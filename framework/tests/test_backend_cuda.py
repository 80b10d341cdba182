"""The CUDA backend where there is none, and its execution on the CPU device that torch always has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pluglm.backends.cuda import CudaBackend
from pluglm.backends.execute import inputs_on
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.backend import BackendContext

CONTEXT = BackendContext(dtype="bfloat16", deterministic=False, num_threads=None)


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CudaBackend.unavailable() == "torch was built without CUDA"
    with pytest.raises(PluginError, match="torch was built without CUDA; use backend 'cpu'"):
        CudaBackend(CudaBackend.Config(), CONTEXT)


def test_a_machine_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaBackend.unavailable() == "no CUDA device is visible"


def test_an_index_beyond_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PluginError, match="index 2 is not visible, there are 2 devices"):
        CudaBackend(CudaBackend.Config(index=2), CONTEXT)
    assert CudaBackend(CudaBackend.Config(index=1), CONTEXT).device == "cuda:1"


def test_deterministic_runs_are_refused_with_a_reason() -> None:
    assert "batch" in CudaBackend.capabilities(CudaBackend.Config()).refuses["run:deterministic"]


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValidationError):
        CudaBackend.Config(index=-1)


def test_all_tensors_of_a_batch_move_and_the_rest_stays() -> None:
    tensors: dict[str, Any] = {name: torch.arange(3) for name in ("token_ids_T", "positions_T", "slots_T")}
    inputs = ModelInput(**tensors, logit_rows_R=torch.arange(1), segments=(), block_size=8, copies=((1, 2),))
    moved = inputs_on(inputs, "meta")
    for name in (*tensors, "logit_rows_R"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(inputs, name).shape
    assert (moved.segments, moved.block_size, moved.copies) == ((), 8, ((1, 2),))
