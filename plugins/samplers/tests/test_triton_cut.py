"""The Triton kernel of top_k, top_p and min_p: its cases in triton's interpreter, and what it costs when compiled.

Triton decides at the import of a kernel whether it is interpreted, so the cases run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pluglm.triton_kernels.aot import ARCHITECTURES, SHARED_LIMITS
from pluglm_samplers.device_cut import can_cut

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
    assert [file.stem for file in FILES] == ["triton_chain_cases", "triton_cut_cases"]


def test_rows_on_the_host_are_left_to_numpy() -> None:
    assert not can_cut(torch.zeros(1, 10))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_without_spills(arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from pluglm_samplers.triton.cases import sampler_cases

    for case in sampler_cases():
        report = case.compile(arch)
        assert (report.spill_stores, report.spill_loads) == (0, 0), case.name
        assert report.shared_bytes <= SHARED_LIMITS[arch], case.name
        assert report.registers * case.num_warps * 32 <= 65536, case.name  # registers of one multiprocessor
        assert report.instructions["ld.global.v4"] > 0, case.name
