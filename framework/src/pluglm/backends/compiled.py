"""Row-wise functions through torch.compile. Knows whether this machine can compile, nothing of what is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

import torch

from pluglm.backends.rows import RowFunction
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog

KERNEL = "torch.compile"


class CompiledRows:
    """A RowMap that calls functions as torch.compile makes them, each compiled once for all layers of one shape.

    Weights are inputs of what is compiled, and so is the number of rows, save 0 and 1, which torch takes apart. A
    function is compiled when it is first called; the attention between two of them is never seen. Whole or not at all:
    RuntimeError for what cannot be compiled in one piece. Its plain reference is whole_rows.
    """

    def __init__(self) -> None:
        from torch._dynamo.exc import TorchDynamoException  # takes a second, which only those who compile pay

        self._failure = TorchDynamoException
        self._compiled: dict[Any, RowFunction] = {}

    def __call__(self, function: RowFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        body = getattr(function, "__func__", function)
        kind = (getattr(body, "__code__", type(body)), *((x.shape[1:], x.dtype) for x in tensors))
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(_on_its_own(cast(FunctionType, _call)), dynamic=True, fullgraph=True)
        try:
            return self._compiled[kind](function, *tensors)
        except self._failure as error:
            name = getattr(body, "__qualname__", type(body).__name__)
            raise RuntimeError(
                f"torch.compile failed for {name}: {_said(error)}; set backend.compile: false"
            ) from error


def _call(function: RowFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return function(*tensors)


def _on_its_own(function: FunctionType) -> RowFunction:
    """The same with code of its own: torch keeps what it compiled, and counts it, by code object of the process."""
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def compiled_rows(device: str, log: KernelLog, refused: Sequence[str]) -> CompiledRows:
    """With the choice in `log`; refused: kernels that `kernels: torch` rules out.

    PluginError, with the reason, where nothing can be compiled for the device.
    """
    if reason := why_not_compile(device):
        raise PluginError(f"backend.compile cannot be had here: {reason}; leave out backend.compile")
    passed_over = tuple((name, "the config says kernels: torch") for name in refused)
    for operation in ("decoder layer", "head"):
        log.add(KernelChoice(operation, KERNEL, passed_over))
    return CompiledRows()


def why_not_compile(device: str) -> str | None:
    """Why torch.compile does not work on the device, or None. Compiles a function that no cache can hold already."""
    never_seen = time.time()

    def trial(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sin() + never_seen,)

    compiled = torch.compile(_on_its_own(cast(FunctionType, trial)), dynamic=False, fullgraph=True)
    try:
        compiled(torch.zeros(2, device=device))
    except Exception as error:  # of torch, of the compiler that it calls or of the driver
        return f"a first compilation failed: {_said(error)}"
    return None


def _said(error: Exception) -> str:
    """The first line that says something, or the error's type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
