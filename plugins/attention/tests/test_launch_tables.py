"""Tile sizes that were measured reach the Triton kernels by the config, or the run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pluglm.kernel.errors import ConfigError, IncompatibleError
from pluglm.kernel.interfaces.kernels import Candidate
from pluglm.testing.attention_cases import batch_of, fresh_store, make_case, new_rows
from pluglm.testing.context import make_context, small_spec
from pluglm_attention.flash import FlashAttention
from pluglm_attention.kernel_choice import CANDIDATES, KernelConfig
from pluglm_attention.paged import PagedAttention
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, LaunchConfig, write_table

PLUGINS = [(FlashAttention, "flash"), (PagedAttention, "paged")]


class Launches:
    """Stands for the launches of the Triton kernels, and keeps the tables that they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[Any] = []
        monkeypatch.setattr("pluglm_attention.triton.launch.launch_unified", self)
        monkeypatch.setattr("pluglm_attention.triton.launch.launch_flash", self)
        monkeypatch.setattr("pluglm_attention.triton.launch_scatter.launch_scatter", lambda *arguments: None)
        anywhere = tuple(Candidate(one.name, lambda context: None) for one in CANDIDATES)
        monkeypatch.setattr("pluglm_attention.kernel_choice.CANDIDATES", anywhere)

    def __call__(self, *arguments: Any, table: Any, scales: Any = None) -> None:
        self.tables.append(table)


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_a_measured_table_is_what_triton_is_launched_with(
    cls: type[Any], name: str, kernel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    launches, measured = Launches(monkeypatch), {("flash", 90, 64): LaunchConfig(32, 16, 2, 1)}
    write_table(tmp_path / "table.json", measured, "a device")
    case = make_case(small_spec().layers[0], [(3, 2)])
    for table, expected in ((None, DEFAULT_TABLE), (tmp_path / "table.json", {**DEFAULT_TABLE, **measured})):
        attention = cls(KernelConfig(kernel=kernel, launch_table=table), make_context())
        store = fresh_store(case, small_spec(), "cpu")
        attention.run(case.layer, *new_rows(case, "cpu"), attention.plan(batch_of(case, "cpu")), store)
        assert launches.tables.pop() == expected


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
def test_a_table_that_would_not_be_used_is_refused(cls: type[Any], name: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for kernel in ("native", "tiled", "torch"):
        with pytest.raises(ValidationError, match=f"launch_table is for the kernel triton, and kernel is {kernel}"):
            KernelConfig(kernel=kernel, launch_table=path)  # type: ignore[arg-type]
    reason = "launch_table is for the kernel triton: it runs on CUDA devices, not on cpu; leave it out"
    with pytest.raises(IncompatibleError, match=f"attention '{name}': {reason}"):
        cls(KernelConfig(launch_table=path), make_context())


def test_a_table_that_is_none_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    Launches(monkeypatch)
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^attention.launch_table: .*table.json is no table of launch configs") as no:
        PagedAttention(KernelConfig(launch_table=tmp_path / "table.json"), make_context())
    assert "\n" not in str(no.value)
