"""How fast this machine reads memory with the threads of the native kernels: the bound of decoding one sequence."""

from __future__ import annotations

import time

import torch

from pluglm.native.tools import NativeTools


def read_bandwidth(tools: NativeTools, num_bytes: int = 512 << 20, rounds: int = 6) -> float:
    """Bytes a second, the best of `rounds` readings of a buffer in huge pages, with and without a prefetch in turn.

    num_bytes: far above all caches.
    """
    buffer = tools.empty((num_bytes,), torch.uint8)
    buffer.fill_(1)
    best = float("inf")
    for number in range(rounds):
        started = time.perf_counter()
        tools.library.pluglm_read(tools.handle, buffer.data_ptr(), num_bytes, number % 2)
        best = min(best, time.perf_counter() - started)
    return num_bytes / best
