"""What is measured on a GPU, in triton's interpreter: both sides compute the same, and bytes and rates are counted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from row_kernels import Shape, copy_rate, measure, workloads

SHAPE = Shape(num_rows=2, hidden=24, inner=20, heads=4, kv_heads=2, head_dim=6)
ROW, WEIGHT = 2 * 24 * 4, 24 * 4
# float32, by hand: rows of x, residual, sum and result; 6 of 8 heads of 6 values, with angles and weights.
BYTES = {
    "norm": 2 * ROW + WEIGHT,
    "add_norm": 4 * ROW + WEIGHT,
    "add": 3 * ROW,
    "gather": 2 * ROW + 2 * 8,
    "gated silu": 2 * 60 * 4,
    "rope": 2 * (2 * 36 + 2 * 6) * 4,
    "norm_rope": 2 * (2 * 36 + 2 * 6) * 4 + 36 * 4,
}


def test_both_sides_of_a_workload_compute_the_same() -> None:
    found = list(workloads(SHAPE, "cpu", torch.float32))
    assert {one.name: one.num_bytes for one in found} == BYTES
    for one in found:
        torch.testing.assert_close(one.launch(), one.by_torch(), rtol=0, atol=1e-5, msg=one.name)


def test_figures_are_of_the_times_and_bytes() -> None:
    times = count(1)

    def timer(run: Callable[[], object]) -> float:
        run()
        return float(next(times))

    figures = list(measure(SHAPE, "cpu", torch.float32, timer, 1e6))
    assert [one.kernel for one in figures] == list(BYTES)
    assert [(one.us, one.torch_us) for one in figures[:2]] == [(1000.0, 2000.0), (3000.0, 4000.0)]
    assert figures[1].gb_per_s == pytest.approx(BYTES["add_norm"] / 3e-3 / 1e9)
    assert figures[1].share == pytest.approx(BYTES["add_norm"] / 3e-3 / 1e6)


def test_a_copy_reads_and_writes() -> None:
    assert copy_rate("cpu", lambda run: 2.0 if run() is not None else 0.0, num_bytes=1000) == pytest.approx(1e6)
