"""torch.compile of row functions: the values of the functions themselves, one compilation for all layers, no fallback.

Authority: the same functions uncompiled, transformers for a whole model (tests/test_compiled_model.py).
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pluglm.backends import compiled
from pluglm.backends.compiled import KERNEL, CompiledRows
from pluglm.backends.cpu import CpuBackend
from pluglm.backends.cuda import CudaBackend
from pluglm.backends.rows import whole_rows
from pluglm.kernel.errors import IncompatibleError, PluginError
from pluglm.kernel.interfaces.backend import BackendContext

CONTEXT = BackendContext(dtype="float32", deterministic=False, num_threads=1)


class Layer:
    """A row function over a weight of its own, as those of a model are."""

    def __init__(self, seed: int) -> None:
        self.weight_NK = torch.randn((3, 5), generator=torch.Generator().manual_seed(seed))

    def double(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.silu(x_TK @ self.weight_NK.T), x_TK * 2


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs reach the compiler; they run as torch operations, so that no C++ is compiled here."""
    counted: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        counted.append(len(inputs))
        return graph.forward

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: whole(function, backend=count, **options))
    return counted


def test_layers_share_what_is_compiled_and_keep_their_weights(num_compiled: list[int]) -> None:
    rows = CompiledRows()
    for seed in range(12):
        layer = Layer(seed)
        for num_rows in (7, 3, 1, 40):
            x_TK = torch.randn(num_rows, 5)
            for ours, plain in zip(rows(layer.double, x_TK), whole_rows(layer.double, x_TK), strict=True):
                torch.testing.assert_close(ours, plain)
    assert len(num_compiled) == 2  # of one row, and of any other number


def test_runs_do_not_use_up_the_recompilations_of_one_another(num_compiled: list[int]) -> None:
    """torch allows a code object eight graphs, and every engine of the process calls the same functions."""
    for width in range(2, 22):
        rows = CompiledRows()
        (doubled,) = rows(lambda x: (x + x,), torch.ones(3, width))
        assert doubled.tolist() == [[2.0] * width] * 3
    assert len(num_compiled) == 20


def test_shapes_of_layers_do_not_use_up_those_of_one_run(num_compiled: list[int]) -> None:
    rows = CompiledRows()
    for width in range(2, 22):
        assert torch.equal(rows(lambda x: (x - 1,), torch.ones(3, width))[0], torch.zeros(3, width))
    assert len(num_compiled) == 20


def test_what_cannot_be_compiled_whole_is_named(num_compiled: list[int]) -> None:
    def branches(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x if x.sum() > 0 else -x,)

    with pytest.raises(
        RuntimeError, match=r"torch.compile failed for .*branches: .*; set backend.compile: false"
    ) as one:
        CompiledRows()(branches, torch.ones(3, 2))
    assert "\n" not in str(one.value)


def test_a_machine_that_compiles_nothing_is_told_so_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, **options: Any) -> Any:
        def call(*tensors: torch.Tensor) -> Any:
            raise RuntimeError("\n  no compiler here  \nmore")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    config = CpuBackend.Config(kernels="torch", compile=True)
    with pytest.raises(
        PluginError, match="cannot be had here: a first compilation failed: no compiler here; leave out"
    ):
        CpuBackend(config, CONTEXT)


@pytest.mark.parametrize("config", [CpuBackend.Config, CudaBackend.Config])
def test_it_is_refused_beside_other_kernels(config: Any) -> None:
    for kernels in ("auto", "native" if config is CpuBackend.Config else "triton"):
        with pytest.raises(ValidationError, match=f"kernels is {kernels}; set kernels: torch"):
            config(compile=True, kernels=kernels)
    assert config(compile=True, kernels="torch").compile


def test_deterministic_runs_refuse_it() -> None:
    context = BackendContext(dtype="float32", deterministic=True, num_threads=1)
    with pytest.raises(IncompatibleError, match=r"set backend\.compile: false or deterministic: false"):
        CpuBackend(CpuBackend.Config(kernels="torch", compile=True), context)


def test_cuda_hands_its_models_compiled_rows_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(compiled, "why_not_compile", lambda device: None)
    offered: list[Any] = []
    family: Any = SimpleNamespace(load=lambda checkpoint, context: offered.append(context))
    backend = CudaBackend(CudaBackend.Config(kernels="torch", compile=True), CONTEXT)
    backend.load_model(family, SimpleNamespace(), None, lambda *progress: None)  # type: ignore[arg-type]
    assert isinstance(offered[0].map_rows, CompiledRows)
    assert offered[0].fuser is None
    refused = (("triton", "the config says kernels: torch"),)
    choices = [(one.operation, one.kernel, one.refused) for one in backend.kernels.choices]
    assert choices == [("decoder layer", KERNEL, refused), ("head", KERNEL, refused)]


def test_a_machine_without_a_compiler_compiles_nothing() -> None:
    """In a process of its own: torch looks for a compiler once."""
    code = "from pluglm.backends.compiled import why_not_compile; print(why_not_compile('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a first compilation failed: ")
    assert "compiler" in done.stdout
    assert done.stdout.count("\n") == 1
