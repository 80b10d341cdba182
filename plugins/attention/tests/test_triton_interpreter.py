"""The Triton kernels in triton's interpreter, against float64.

Triton decides at the import of a kernel whether it is interpreted, so the cases run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

FOLDER = Path(__file__).parent / "triton_interpreted"
FILES = sorted(FOLDER.glob("*_cases.py"))


@pytest.mark.parametrize("cases", FILES, ids=lambda file: file.stem)
def test_in_interpreter(cases: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def test_all_cases_are_found() -> None:
    names = [file.stem for file in FILES]
    assert names == [f"triton_{name}_cases" for name in ("autotune", "flash", "guard", "scatter", "split", "unified")]
