"""Captured graphs without a GPU: torch operations are recorded, and replayed on the tensors they were recorded with.

As with a CUDA graph, whatever the host decides while it is recorded stays so, and operations that make the host wait
are refused. What is no torch operation is not seen: Triton kernels, and on CPU tensors `tolist`, `numpy` and `cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pluglm.backends.graphs import Captured

# Operations whose result or size the host has only after it waited for the device, or that copy from the host's memory.
# In inference mode torch hands over the composite ones as they are, so that both kinds are named.
WAITING = frozenset(
    (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
        *("nonzero", "argwhere", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("lift_fresh", "lift_fresh_copy"),
    )
)

_Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class WaitError(RuntimeError):
    """An operation for which the host would wait for the device, or that a capture does not allow."""


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Inside it, every operation for which the host would wait for a device raises WaitError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_no_wait(func, args)
        return func(*args, **(kwargs or {}))


def check_no_wait(func: Any, args: Any) -> None:
    """Raises WaitError naming the operation."""
    name = func.overloadpacket.__name__
    if name in WAITING or _has_size_of_contents(name, args):
        raise WaitError(f"'{name}' makes the host wait, or reads its memory")


def _has_size_of_contents(name: str, args: Any) -> bool:
    """Picks by a mask, `where` of a condition alone, and repeats that a tensor counts."""
    if name in ("index", "index_put", "index_put_"):
        return any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1]))
    if name == "repeat_interleave":
        return len(args) == 1 or isinstance(args[1], torch.Tensor)
    return name == "where" and len(args) == 1


class RecordingTools:
    """GraphTools for tensors of any device. num_captures and num_replays count."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        """Runs `function` twice, recording the second time."""
        function()
        with _Recorder() as recorder:
            output = function()
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            for call in recorder.calls:
                _again(*call)

        return Captured(replay, output)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_no_wait(func, args)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {_storage(one) for one in _tensors((args, kwargs))}
        outputs = _tensors(result)
        is_view = any(_storage(one) in inputs for one in outputs) and not func._schema.is_mutable
        if not is_view:  # a view shows the new contents by itself
            self.calls.append((func, args, kwargs, outputs))
        return result


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
    """Runs a recorded operation; the results go where they went the first time."""
    fresh = _tensors(func(*args, **kwargs))
    if not func._schema.is_mutable:
        for output, result in zip(outputs, fresh, strict=True):
            output.copy_(result)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
