"""The attention kernels compiled for every architecture without a GPU: no spills, tensor cores, shared memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pluglm.triton_kernels.aot import ARCHITECTURES, SHARED_LIMITS, CompileReport, KernelCase

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Tiles of 64 rows and more use the tensor cores that came with the architecture, smaller ones those of 8.0.
TENSOR_CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def check(case: KernelCase, arch: int) -> CompileReport:
    report = case.compile(arch)
    assert (report.spill_stores, report.spill_loads) == (0, 0), case.name
    assert report.shared_bytes <= SHARED_LIMITS[arch], case.name
    assert report.registers * case.num_warps * 32 <= 65536, case.name  # registers of one multiprocessor
    rows = case.constexprs.get("BLOCK_M")
    if rows is not None and case.signature["q"] != "*fp32":
        assert report.instructions[TENSOR_CORES[arch] if rows >= 64 else "mma.sync"] > 0, case.name
        assert report.instructions["cp.async"] > 0, case.name
    return report


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: int) -> None:
    from pluglm_attention.triton.cases import usual_cases

    cases = list(usual_cases(arch))
    names = {case.fn.__name__ for case in cases}
    assert names == {"unified_kernel", "flash_kernel", "reduce_kernel", "scatter_kernel"}
    for case in cases:
        check(case, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_rest_of_the_launch_table(arch: int) -> None:
    from pluglm_attention.triton.cases import other_cases

    for case in other_cases(arch):
        check(case, arch)


def test_e4m3_does_not_compile_before_8_9() -> None:
    """Why launch_configs.check_storage refuses it there."""
    from pluglm_attention.triton.cases import scatter_case

    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        scatter_case("bf16", "fp8e4nv", 64).compile(80)
