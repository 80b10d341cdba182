"""How many threads are sensible: the cores this process may use, and what a control group lets it have of them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch


def usable_cores(root: Path = Path("/")) -> int:
    """Whole cores, at least 1. root: where /sys is looked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = root / "sys/fs/cgroup/cpu.max"
    if quota.exists():
        limit, _, period = quota.read_text().partition(" ")
        if limit.isdigit() and period.strip().isdigit():
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


def default_threads() -> int:
    """torch's own choice, which counts physical cores and heeds OMP_NUM_THREADS, within the usable ones."""
    return max(1, min(torch.get_num_threads(), usable_cores()))
