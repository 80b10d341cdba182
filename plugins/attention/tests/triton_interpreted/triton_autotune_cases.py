"""The measuring of launch configs with a clock that the test sets: every kernel runs, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import OutOfResources

from pluglm_attention.triton.autotune import candidates, fastest, tune
from pluglm_attention.triton.launch_configs import LaunchConfig, read_table, write_table

FAST, SLOW, HUGE = LaunchConfig(16, 16, 4, 1), LaunchConfig(16, 32, 4, 1), LaunchConfig(128, 128, 4, 4)


def test_every_kernel_is_run_and_the_fastest_written(world: Any, tmp_path: Path) -> None:
    runs = []

    def timer(run: Callable[[], object]) -> float:
        out = run()
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all()
        runs.append(out.dtype)
        return float(len(runs) % 2)  # the second of each pair takes no time

    found = tune(
        world.layer(2, 1, 40),
        torch.device("cpu"),
        torch.float16,
        timer,
        prompts=((0, 5), (3, 2)),
        decodes=((9, 1),),
        options=lambda kernel: iter((SLOW, FAST)),
    )
    assert set(found) == {(kernel, 90, 64) for kernel in ("prefill", "quantised", "decode", "flash", "float32")}
    assert set(found.values()) == {FAST}
    assert runs.count(torch.float32) == 2
    write_table(tmp_path / "table.json", found, "a device")
    assert read_table(tmp_path / "table.json")["decode", 90, 64] == FAST


def run(config: LaunchConfig) -> LaunchConfig:
    if config == HUGE:
        raise OutOfResources(300000, 232448, "shared memory")
    return config


def test_configs_that_do_not_fit_are_skipped() -> None:
    times = {SLOW: 2.0, FAST: 1.0}

    def timer(call: Callable[[], Any]) -> float:
        return times[call()]

    assert fastest(run, iter((HUGE, SLOW, FAST)), timer) == FAST
    with pytest.raises(ValueError, match="no launch config fits"):
        fastest(run, iter((HUGE,)), timer)


def test_decode_is_tried_with_the_smallest_tile_only() -> None:
    assert {config.block_m for config in candidates("decode")} == {16}
    assert {config.block_m for config in candidates("flash")} == {64, 128}
