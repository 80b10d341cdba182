"""The process's own memory: how much is resident, and giving back what the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

from pluglm.kernel.interfaces.services import Progress

_STATUS = Path("/proc/self/status")
_TENSORS_BETWEEN = 16


def resident_memory() -> int:
    """Bytes of this process in memory; where the system has no /proc, the most that it ever had."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        return int(fields["VmRSS"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back_free_memory() -> None:
    """glibc's malloc_trim(3). Other C libraries have none, and keep less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def giving_back(progress: Progress) -> Progress:
    """progress, and now and then the memory of tensors that came and went.

    Between the small tensors that stay, glibc cannot use it again: half as much as the weights would pile up.
    """

    def report(what: str, done: int, total: int) -> None:
        if done % _TENSORS_BETWEEN == 0:
            give_back_free_memory()
        progress(what, done, total)

    return report
