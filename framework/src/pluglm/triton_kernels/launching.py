"""What the launchers share: checks of their tensors, block sizes, and the device that a launch goes to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pluglm.triton_kernels.availability import check_dtype, unavailable

MOST_FEATURES = 16384  # of a row that one program holds in registers, in float32 and without spills

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps_for(block: int) -> int:
    """Warps for `block` values held at once: 16 values a thread or more, between 1 and 32 warps of 32 threads."""
    return min(max(block // 512, 1), 32)


def check_rows(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    """ValueError unless `tensor` is of a type the kernels compute with, with values of its last dimension adjacent."""
    check_dtype(tensor)
    if tensor.dtype not in _FLOATS or tensor.dim() != num_dims:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not floats of {num_dims} dimensions"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}: the values of a row must lie side by side")


def same(name: str, found: Any, expected: Any) -> None:
    """ValueError unless they are equal."""
    if found != expected:
        raise ValueError(f"{name} is {found}, not {expected}")


def launch(kernel: Callable[[], Any], device: torch.device) -> None:
    """Calls `kernel` with `device` as the current one, as triton wants it. ValueError where no kernel can run."""
    if reason := unavailable():
        raise ValueError(f"triton kernels cannot run here: {reason}")
    with _current(device):
        kernel()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
