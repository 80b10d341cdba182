"""The library at work: its threads, its memory in huge pages. One per backend, so engines share nothing."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import torch

from pluglm.native.arena import Arena
from pluglm.native.build import NativeBuildError, default_cache, forget, keep, library_path
from pluglm.native.isa import LEVELS, Level, missing
from pluglm.native.library import load_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
SPIN_US = 50  # longer than the gaps between two jobs of a step, shorter than anyone would notice as lost


class NativeTools:
    """Threads and scratch memory of the native kernels. Calls of several threads run one after another.

    level: the instruction level built for; refused: (level, reason) of better ones; num_threads counts the caller.
    NativeBuildError when no level can be built and loaded, or the one asked for cannot, or the threads cannot start.
    After a fork, the child's calls run on the calling thread alone.
    """

    def __init__(
        self, num_threads: int, level: str = "auto", spin_us: int = SPIN_US, cache: Path | None = None
    ) -> None:
        self.num_threads, self.spin_us = num_threads, spin_us
        self.level, self.refused, self.library = _best(level, cache or default_cache())
        self.has_tiles = self.level == "amx" and bool(self.library.pluglm_allow_tiles())
        self._arena = Arena(self.library)
        self.handle: int = self.library.pluglm_open(num_threads, spin_us)
        if not self.handle:
            raise NativeBuildError(f"the system does not start {num_threads} threads")
        self._close = weakref.finalize(self, self.library.pluglm_close, self.handle)
        self._close.atexit = False  # a daemon thread may still be inside a call when the interpreter ends

    def close(self) -> None:
        """End the threads, after a call that still runs. Calls made afterwards find no handle: AttributeError."""
        if self._close.alive:
            del self.handle
            self._close()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in huge pages where the system grants them. MemoryError when there is no room."""
        return self._arena.empty(shape, dtype)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in huge pages, contiguous. What is there already stays."""
        if self._arena.holds(tensor):
            return tensor.contiguous()
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


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
    path = library_path(level, cache)
    try:
        library = load_library(path)
    except NativeBuildError:
        forget(path)
        library = _load_again(library_path(level, cache))
    keep(path)
    return library


def _load_again(path: Path) -> ctypes.CDLL:
    """One that was built anew, unless that has been done before."""
    try:
        return load_library(path)
    except NativeBuildError as error:
        raise NativeBuildError(f"{error}; to have it built once more, delete it") from error
