"""Which instructions this CPU has, as one of a few levels, and what a compiler must be told for each."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_X86 = ("x86_64", "amd64")


@dataclass(frozen=True, slots=True)
class Level:
    """name: as configs say it; needs: flags of /proc/cpuinfo; options: of GCC and Clang."""

    name: str
    needs: tuple[str, ...]
    options: tuple[str, ...]


LEVELS = (
    Level(
        "amx",
        (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
        ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", *(f"-m{one}" for one in _AVX512)),
    ),
    Level("avx512_bf16", (*_AVX512, "avx512_bf16"), ("-mavx512bf16", *(f"-m{one}" for one in _AVX512))),
    Level("avx512", _AVX512, tuple(f"-m{one}" for one in _AVX512)),
    Level("avx2", _AVX2, tuple(f"-m{one}" for one in _AVX2)),
    Level("baseline", (), ()),
)


def missing(level: Level, root: Path = Path("/")) -> str | None:
    """Why this machine cannot run the level, or None. root: where /proc is looked for."""
    if not level.needs:
        return None
    if platform.machine().lower() not in _X86:
        return f"the CPU is {platform.machine()}"
    flags = cpu_flags(root)
    lacking = [one for one in level.needs if one not in flags]
    return f"the CPU lacks {', '.join(lacking)}" if lacking else None


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The flags of the first core; empty where the system has no /proc/cpuinfo."""
    path = root / "proc/cpuinfo"
    if not path.exists():
        return frozenset()
    for line in path.read_text(errors="replace").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return frozenset(values.split())
    return frozenset()
