"""The library at work: its threads, its memory in huge pages. One per backend, so engines share nothing."""

from __future__ import annotations

import ctypes
import math
import weakref
from pathlib import Path

import torch

from pluglm.native.build import NativeBuildError, default_cache, library_path
from pluglm.native.isa import LEVELS, Level, missing
from pluglm.native.library import load_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
LEAST_HUGE, HUGE_PAGE = 1 << 20, 2 << 20  # bytes; src/memory.cpp maps whole huge pages
SPIN_US = 50  # longer than the gaps between two jobs of a step, shorter than anyone would notice as lost


class NativeTools:
    """Threads and scratch memory of the native kernels, used by one caller at a time.

    level: the instruction level built for; refused: (level, reason) of better ones; num_threads counts the caller.
    NativeBuildError when no level can be built and loaded, or the one asked for cannot.
    """

    def __init__(
        self, num_threads: int, level: str = "auto", spin_us: int = SPIN_US, cache: Path | None = None
    ) -> None:
        self.num_threads, self.spin_us = num_threads, spin_us
        self.level, self.refused, self.library = _best(level, cache or default_cache())
        self.has_tiles = self.level == "amx" and bool(self.library.pluglm_allow_tiles())
        self._own: set[int] = set()  # addresses of what `empty` gave out
        self.handle = self.library.pluglm_open(num_threads, spin_us)
        self._close = weakref.finalize(self, self.library.pluglm_close, self.handle)

    def close(self) -> None:
        """End the threads. Nothing may be called afterwards."""
        self._close()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in huge pages where the system grants them. MemoryError when there is no room."""
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        address = self.library.pluglm_map(num_bytes)
        if not address:
            raise MemoryError(f"{num_bytes} bytes of memory cannot be mapped")
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        self._own.add(address)
        weakref.finalize(buffer, _unmap, self.library, self._own, address, num_bytes)
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in huge pages, contiguous. Small tensors stay where they are, and those that are there."""
        if tensor.nbytes < LEAST_HUGE or tensor.data_ptr() in self._own:
            return tensor.contiguous()
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _unmap(library: ctypes.CDLL, own: set[int], address: int, num_bytes: int) -> None:
    own.discard(address)
    library.pluglm_unmap(address, num_bytes)


def _best(wanted: str, cache: Path) -> tuple[str, tuple[tuple[str, str], ...], ctypes.CDLL]:
    """The first level that this machine runs and its compiler knows, or exactly the one wanted."""
    refused: list[tuple[str, str]] = []
    for level in [one for one in LEVELS if wanted in ("auto", one.name)]:
        try:
            return level.name, tuple(refused), _load(level, cache)
        except NativeBuildError as error:
            refused.append((level.name, str(error)))
    if not refused:
        raise NativeBuildError(f"level '{wanted}' is unknown; choose from {', '.join(one.name for one in LEVELS)}")
    raise NativeBuildError("; ".join(dict.fromkeys(reason for _, reason in refused)))


def _load(level: Level, cache: Path) -> ctypes.CDLL:
    if reason := missing(level):
        raise NativeBuildError(reason)
    return load_library(library_path(level, cache))
