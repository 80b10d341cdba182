"""What the launchers share: checks of their tensors, block sizes, and the device that a launch goes to.

Row kernels have no stored table of launch configs as the attention kernels have: they read and write each value once,
so a block is the row itself, or a fixed piece of it, and its warps follow from the values a thread then holds. There
are no stages to choose, as nothing is in a loop. `measure` says what is reached on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pluglm.triton_kernels.availability import check_dtype, not_installed, unavailable

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


def launch(kernel: Callable[[], Any], x: torch.Tensor) -> None:
    """Calls `kernel` with the device of x, its main input, as the current one, as triton wants it.

    ValueError where no kernel can run, and for bfloat16 in the interpreter.
    """
    # A tensor on a GPU shows that there is one; asking again would cost more than the launch.
    if reason := not_installed() if x.is_cuda else unavailable():
        raise ValueError(f"triton kernels cannot run here: {reason}")
    check_dtype(x)
    with _current(x.device):
        kernel()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
