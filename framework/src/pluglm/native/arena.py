"""Memory in huge pages, given out piece by piece, so that weights read one after another lie one after another."""

from __future__ import annotations

import ctypes
import math
import weakref

import torch

HUGE_PAGE = 2 << 20  # bytes
_REGION = 16 * HUGE_PAGE
_ALIGNMENT = 64  # bytes of a cache line


def piece_bytes(num_bytes: int) -> int:
    """What a piece of that many bytes takes of a region."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """Hands out tensors. A region goes back to the system when the last tensor in it is gone."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._regions: dict[int, int] = {}  # start -> end

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contents undefined, aligned to a cache line. MemoryError when the system has no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = piece_bytes(num_bytes)
        if taken <= len(self._rest):
            source, self._rest = self._rest, self._rest[taken:]
        else:
            source = self._region(max(taken, _REGION))
            if len(source) - taken > len(self._rest):
                self._rest = source[taken:]
        return source[:num_bytes].view(dtype).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < end for start, end in list(self._regions.items()))

    def _region(self, num_bytes: int) -> torch.Tensor:
        size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        address = self._library.pluglm_map(size)
        if not address:
            raise MemoryError(f"{size} bytes of memory cannot be mapped")
        buffer = (ctypes.c_char * size).from_address(address)
        self._regions[address] = address + size
        finalizer = weakref.finalize(buffer, _unmap, self._library, self._regions, address, size)
        finalizer.atexit = False  # a thread that still computes may read it; the system takes it back
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _unmap(library: ctypes.CDLL, regions: dict[int, int], address: int, num_bytes: int) -> None:
    regions.pop(address, None)
    library.pluglm_unmap(address, num_bytes)
