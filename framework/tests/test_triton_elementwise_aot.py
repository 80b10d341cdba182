"""The framework's triton kernels compiled for every architecture without a GPU: no spills, wide accesses."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pluglm.triton_kernels.aot import ARCHITECTURES, SHARED_LIMITS, compile_kernel, read_report

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: int) -> None:
    from pluglm.triton_kernels.cases import elementwise_cases

    cases = list(elementwise_cases())
    assert {case.fn.__name__ for case in cases} == {
        "rms_norm_kernel",
        "rope_kernel",
        "gated_kernel",
        "gather_rows_kernel",
    }
    for case in cases:
        report = case.compile(arch)
        assert (report.spill_stores, report.spill_loads) == (0, 0), case.name
        assert report.shared_bytes <= SHARED_LIMITS[arch], case.name
        assert report.registers * case.num_warps * 32 <= 65536, case.name  # registers of one multiprocessor
        assert report.instructions["st.global"] == report.instructions["st.global.v4"] > 0, case.name
        assert report.instructions["ld.global.v4"] > 0, case.name


def _gated() -> Any:
    from pluglm.triton_kernels.cases import gated_case

    return gated_case("*bf16", "gelu_tanh")


def test_without_known_alignment_accesses_are_narrow() -> None:
    case = _gated()
    report = compile_kernel(case.fn, case.signature, case.constexprs, 90, case.num_warps)
    assert report.instructions["ld.global.v4"] == report.instructions["st.global.v4"] == 0
    assert report.instructions["ld.global"] > 4


def test_registers_are_those_of_the_binary(tmp_path: Path) -> None:
    """NVIDIA's cuobjdump, which triton ships, reads them out of the cubin that the compilation left in the cache."""
    import triton

    case = _gated()
    for arch in (80, 120):
        report = case.compile(arch)
        (cubin,) = tmp_path.rglob("*.cubin")
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
        assert re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout) == [(str(report.registers), "0")]
        cubin.unlink()


def test_arguments_must_be_complete() -> None:
    case = _gated()
    with pytest.raises(ValueError, match=r"unknown \['nothing'\], missing \['BLOCK'\], given .* \[\]"):
        compile_kernel(case.fn, {**case.signature, "nothing": "i32"}, {"FORM": "gelu_tanh"}, 90)
    with pytest.raises(ValueError, match="is no JITFunction"):
        compile_kernel(case.fn.fn, case.signature, case.constexprs, 90)


# Written after the formats of CUDA 12.9's `ptxas -v` and of the PTX ISA 8.7.
LOG = """ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Function properties for two
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers
"""
PTX = """
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.b32 %r1, [ %rd1 ];
	ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r2;
	cp.async.commit_group;
	cp.async.wait_group 1;
	cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 1;
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
	@%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p3;
"""


def test_logs_and_instructions_are_counted() -> None:
    report = read_report(LOG, PTX, 1024)
    assert (report.registers, report.spill_stores, report.spill_loads, report.shared_bytes) == (255, 16, 28, 1024)
    assert report.instructions == {
        "wgmma.mma_async": 1,
        "tcgen05.mma": 1,
        "mma.sync": 1,
        "cp.async.bulk": 1,
        "cp.async": 2,
        "ld.global": 3,
        "ld.global.v4": 2,
        "st.global": 0,
        "st.global.v4": 0,
    }
    with pytest.raises(ValueError, match="said nothing of registers"):
        read_report("", PTX, 0)
