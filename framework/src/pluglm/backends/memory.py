"""How much memory this process could still take on a Linux host. Knows /proc and the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel calls available, or what the tightest control group leaves, whichever is less.

    root: where /proc and /sys are looked for. Without /proc (not Linux) it is the physical memory, an upper bound.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _kernel_available(meminfo)
    return max(0, min([available, *_group_leftovers(root)]))


def _kernel_available(meminfo: Path) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_leftovers(root: Path) -> list[int]:
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    leftovers = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            leftovers += _leftovers(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            leftovers += _leftovers(root / "sys/fs/cgroup/memory", path, *names)
    return leftovers


def _leftovers(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """What each group from `path` up to the mount leaves. Inside a container the path may exist outside only."""
    group = mount / path.lstrip("/")
    leftovers = []
    for folder in (group, *group.parents):
        if (folder / limit_name).exists() and (folder / usage_name).exists():
            limit = (folder / limit_name).read_text().strip()
            if limit != "max":
                used = int((folder / usage_name).read_text()) - _reclaimable(folder / "memory.stat", cache_name)
                leftovers.append(int(limit) - used)
        if folder == mount:
            break
    return leftovers


def _reclaimable(stat: Path, cache_name: str) -> int:
    """Bytes of file cache that the kernel drops first when the group needs memory."""
    if not stat.exists():
        return 0
    fields = dict(line.split(" ", 1) for line in stat.read_text().splitlines() if " " in line)
    return int(fields.get(cache_name, 0))
