"""What every Triton kernel costs on every architecture, compiled here without a GPU.

    python benchmarks/triton_report.py [--arch 80 89 90 100 120] [--record FILE.json]

Prints registers a thread, bytes spilled, shared memory and the instructions that matter, and writes a JSON record.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pluglm.triton_kernels.aot import ARCHITECTURES, SHARED_LIMITS, CompileReport, KernelCase
from pluglm.triton_kernels.availability import not_installed

RECORD = Path(__file__).parent / "records/triton_report.json"

Row = tuple[KernelCase, int, CompileReport]


def all_cases(arch: int) -> Iterator[KernelCase]:
    """The framework's kernels, then those of the attention plugins and of the samplers."""
    from pluglm.triton_kernels.cases import elementwise_cases
    from pluglm_attention.triton.cases import usual_cases
    from pluglm_samplers.triton.cases import sampler_cases

    yield from elementwise_cases()
    yield from usual_cases(arch)
    yield from sampler_cases()


def table_of(rows: list[Row]) -> Table:
    table = Table("kernel", "warps", "sm", "registers", "spilled B", "shared B", "limit", "instructions")
    for case, arch, report in rows:
        used = ", ".join(f"{count} {name}" for name, count in report.instructions.items() if count)
        spilled = report.spill_stores + report.spill_loads
        figures = (case.num_warps, arch, report.registers, spilled, report.shared_bytes, SHARED_LIMITS[arch])
        table.add_row(case.name, *map(str, figures), used, style="red" if spilled else None)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    if reason := not_installed():
        parser.exit(1, f"nothing to compile: {reason}\n")
    import triton

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = [(case, arch, case.compile(arch)) for arch in arguments.arch for case in all_cases(arch)]
    Console().print(table_of(rows))
    kernels = [
        {"kernel": case.name, "num_warps": case.num_warps, "arch": arch, **asdict(one)} for case, arch, one in rows
    ]
    arguments.record.write_text(json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
