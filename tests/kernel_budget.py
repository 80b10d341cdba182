"""Prints the kernel's size against its budget, in lines that are neither blank nor a comment; exits 1 when over."""

from __future__ import annotations

import sys
from pathlib import Path

BUDGET = 2000
KERNEL = Path(__file__).parents[1] / "framework/src/pluglm/kernel"


def kernel_lines() -> int:
    lines = [line.strip() for file in KERNEL.rglob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    return sum(1 for line in lines if line and not line.startswith("#"))


if __name__ == "__main__":
    count = kernel_lines()
    print(f"kernel: {count} lines of {BUDGET}")
    sys.exit(count > BUDGET)
