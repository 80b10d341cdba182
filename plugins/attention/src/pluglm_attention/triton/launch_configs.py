"""Tile sizes of the attention kernels by kernel, device and head dim. Imports no triton.

The table here was chosen from what the compiler reports (no spills, shared memory within the device's limit) and has
not been measured on a GPU yet; `autotune` measures one for a device and writes it to a file, which the config key
`launch_table` of an attention names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

# quantised: prefill over codes with scales; float32: each of the others, with queries of that dtype.
Kernel = Literal["prefill", "quantised", "decode", "flash", "float32"]
Key = tuple[str, int, int]  # kernel, compute capability (90 is 9.0), largest head dim

CAPABILITIES = (80, 89, 90, 100, 120)
HEAD_DIMS = (64, 128, 256)
FP8_CAPABILITY = 89


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """block_m: rows (query tokens x query heads of a kv head) and block_n: keys of a tile, powers of two from 16 on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


LaunchTable = Mapping[Key, LaunchConfig]


def _default_table() -> dict[Key, LaunchConfig]:
    table: dict[Key, LaunchConfig] = {}
    for capability in CAPABILITIES:
        large, narrow = LaunchConfig(128, 64, 8, 3), LaunchConfig(64, 32, 8, 2)
        # 9.0 and 10.0 keep operands, 10.0 sums as well, out of the registers; elsewhere large tiles would spill.
        wide = capability in (90, 100)
        for kernel in ("prefill", "flash"):
            table[kernel, capability, 64] = large
            table[kernel, capability, 128] = large if wide else LaunchConfig(64, 32, 4, 3)
            table[kernel, capability, 256] = narrow
        table["quantised", capability, 64] = large if wide else LaunchConfig(128, 32, 8, 3)
        table["quantised", capability, 128] = large if wide else LaunchConfig(64, 32, 8, 3)
        table["quantised", capability, 256] = narrow
        table["decode", capability, 64] = LaunchConfig(16, 64, 4, 3)
        table["decode", capability, 128] = LaunchConfig(16, 64, 4, 3)
        table["decode", capability, 256] = (
            LaunchConfig(16, 64, 8, 2) if capability == 100 else LaunchConfig(16, 32, 4, 3)
        )
        # Its products do not use tensor cores: each thread holds rows of its own, and larger tiles would spill.
        for head_dim in HEAD_DIMS:
            table["float32", capability, head_dim] = LaunchConfig(16, 16, 4 if head_dim == 64 else 8, 1)
    return table


DEFAULT_TABLE: LaunchTable = MappingProxyType(_default_table())


def capability_class(device: torch.device) -> int:
    """The entry of CAPABILITIES whose limits hold on the device: the same major number, and no newer a minor one.

    ValueError below 8.0. Newer devices than all are taken for 12.0, which has the least shared memory. The
    interpreter's device (cpu) is taken for 9.0.
    """
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"the Triton attention needs compute capability 8.0 or newer, {device} has {major}.{minor}")
    if (major, minor) == (8, 6):  # as little shared memory as 8.9
        return 89
    within = [one for one in CAPABILITIES if one // 10 == major and one <= major * 10 + minor]
    return max(within, default=120)


def check_storage(dtype: torch.dtype, device: torch.device) -> None:
    """ValueError for e4m3 where the device has no such type (before 8.9)."""
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < FP8_CAPABILITY:
        raise ValueError(f"{device} has compute capability {major}.{minor}, and e4m3 needs 8.9: store int8 instead")


def choose_config(table: LaunchTable, kernel: Kernel, device: torch.device, head_dim: int) -> LaunchConfig:
    """ValueError for head dims above the largest of HEAD_DIMS."""
    fitting = [size for size in HEAD_DIMS if head_dim <= size]
    if not fitting:
        raise ValueError(f"the Triton attention has head dims up to {HEAD_DIMS[-1]}, not {head_dim}")
    return table[kernel, capability_class(device), fitting[0]]


def write_table(path: Path, table: LaunchTable, device_name: str) -> None:
    """A JSON file with one entry a key; device_name says where it was measured."""
    entries = [
        {"kernel": kernel, "capability": capability, "head_dim": head_dim, **asdict(config)}
        for (kernel, capability, head_dim), config in sorted(table.items())
    ]
    path.write_text(json.dumps({"device": device_name, "entries": entries}, indent=1) + "\n", encoding="utf-8")


def read_table(path: Path) -> LaunchTable:
    """The default table, with the entries of a file from write_table in their places.

    ValueError of one line, also for a file that cannot be read or is none of write_table; it names a bad entry.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return MappingProxyType({**DEFAULT_TABLE, **dict(_entry(path, one) for one in entries)})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of launch configs: {' '.join(str(error).split())}") from error


def _entry(path: Path, entry: Mapping[str, Any]) -> tuple[Key, LaunchConfig]:
    fields = dict(entry)
    try:
        key = (fields.pop("kernel"), fields.pop("capability"), fields.pop("head_dim"))
        config = LaunchConfig(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {entry} is no launch config: {error}") from error
    if key not in DEFAULT_TABLE:
        raise ValueError(f"{path}: {entry} is of no known kernel, capability and head dim")
    if any(type(one) is not int or one < 1 for one in asdict(config).values()):
        raise ValueError(f"{path}: {entry} must have whole numbers from 1")
    return key, config
