"""Measures the row kernels on a GPU beside the torch operations they stand for. It was never run on a GPU yet.

python benchmarks/row_kernels.py RECORD.json --rows 1 32 1024 --hidden 4096 --inner 14336 --heads 32 --kv-heads 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pluglm.models.activations import ACTIVATIONS
from pluglm.models.norms import head_norm, row_norm
from pluglm.models.rope import rotate
from pluglm.triton_kernels.availability import is_interpreted, unavailable
from pluglm.triton_kernels.gated import gated
from pluglm.triton_kernels.gather import gather_rows
from pluglm.triton_kernels.rms_norm import add_rms_norm, add_rows, rms_norm
from pluglm.triton_kernels.rope import rope

# T: rows, D: hidden size, I: inner size, C: query heads and then key heads of a row, H: head dim

Timer = Callable[[Callable[[], object]], float]  # milliseconds of one call

EPS = 1e-5
COPIED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer and of a step."""

    num_rows: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One launch, the same by torch, and the bytes that have to be read or written, each once."""

    name: str
    launch: Callable[[], object]
    by_torch: Callable[[], object]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Figure:
    """us and torch_us: microseconds of a call; share: of the rate at which the device copies memory."""

    kernel: str
    num_rows: int
    us: float
    torch_us: float
    gb_per_s: float
    share: float


def workloads(shape: Shape, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    """Every launch of a layer whose heads are normalised and whose changes are not, and the gather of all rows."""
    x_TD, residual_TD = torch.randn((2, shape.num_rows, shape.hidden), device=device).to(dtype)
    weight_D = torch.rand(shape.hidden, device=device)
    norm, row_bytes = row_norm(weight_D.to(dtype), EPS, 0.0), x_TD.nbytes
    yield Workload("norm", lambda: rms_norm(x_TD, weight_D, EPS), lambda: norm(x_TD), 2 * row_bytes + weight_D.nbytes)

    def add_and_norm() -> tuple[torch.Tensor, torch.Tensor]:
        sum_TD = x_TD + residual_TD
        return norm(sum_TD), sum_TD

    yield Workload(
        "add_norm",
        lambda: add_rms_norm(x_TD, residual_TD, weight_D, EPS),
        add_and_norm,
        4 * row_bytes + weight_D.nbytes,
    )
    yield Workload("add", lambda: add_rows(x_TD, residual_TD), lambda: x_TD + residual_TD, 3 * row_bytes)
    rows_T = torch.randperm(shape.num_rows, device=device)
    yield Workload(
        "gather", lambda: gather_rows(x_TD, rows_T), lambda: x_TD.index_select(0, rows_T), 2 * row_bytes + rows_T.nbytes
    )
    yield _gated_workload(shape, device, dtype)
    yield from _head_workloads(shape, device, dtype)


def _gated_workload(shape: Shape, device: str, dtype: torch.dtype) -> Workload:
    gate_up = torch.randn((shape.num_rows, 2 * shape.inner), device=device).to(dtype)

    def by_torch() -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS["silu"](gate).mul_(up)

    return Workload("gated silu", lambda: gated(gate_up, "silu"), by_torch, gate_up.nbytes * 3 // 2)


def _head_workloads(shape: Shape, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    """The rotation of the q and k part of a product, without and with norms of the heads."""
    num_rows, head_dim, rotated = shape.num_rows, shape.head_dim, shape.heads + shape.kv_heads
    heads_TCH = torch.randn((num_rows, rotated + shape.kv_heads, head_dim), device=device).to(dtype)
    turned_TCH = heads_TCH[:, :rotated]
    half_T1F = torch.rand((num_rows, 1, head_dim // 2), device=device)
    cos_T1H, sin_T1H = (torch.cat(pair, -1).to(dtype) for pair in ((half_T1F, half_T1F), (-half_T1F, half_T1F)))
    weight_H = torch.rand(head_dim, device=device)
    norm = head_norm([(weight_H.to(dtype), rotated)], EPS, 0.0)
    weight_CH = weight_H.expand(rotated, -1).contiguous()
    num_bytes = 2 * num_rows * rotated * head_dim * dtype.itemsize + cos_T1H.nbytes + sin_T1H.nbytes
    yield Workload(
        "rope", lambda: rope(turned_TCH, cos_T1H, sin_T1H), lambda: rotate(turned_TCH, cos_T1H, sin_T1H), num_bytes
    )
    yield Workload(
        "norm_rope",
        lambda: rope(turned_TCH, cos_T1H, sin_T1H, weight_CH, EPS),
        lambda: rotate(norm(turned_TCH), cos_T1H, sin_T1H),
        num_bytes + weight_CH.nbytes,
    )


def copy_rate(device: str, timer: Timer, num_bytes: int = COPIED_BYTES) -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (timer(lambda: target.copy_(source)) * 1e-3)


def measure(shape: Shape, device: str, dtype: torch.dtype, timer: Timer, bytes_per_s: float) -> Iterator[Figure]:
    """bytes_per_s: as copy_rate gives it."""
    for one in workloads(shape, device, dtype):
        time_ms, torch_ms = timer(one.launch), timer(one.by_torch)
        rate = one.num_bytes / (time_ms * 1e-3)
        yield Figure(one.name, shape.num_rows, time_ms * 1e3, torch_ms * 1e3, rate / 1e9, rate / bytes_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="the JSON file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 1024])
    for name, default in {"hidden": 4096, "inner": 14336, "heads": 32, "kv-heads": 8, "head-dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if (reason := unavailable()) or is_interpreted():
        parser.exit(1, f"nothing to measure: {reason or 'kernels run in the interpreter'}\n")
    from triton.testing import do_bench  # type: ignore[import-not-found, import-untyped, unused-ignore]

    rate = copy_rate("cuda", do_bench)
    sizes = (arguments.hidden, arguments.inner, arguments.heads, arguments.kv_heads, arguments.head_dim)
    shapes = [Shape(num_rows, *sizes) for num_rows in arguments.rows]
    figures = [asdict(one) for shape in shapes for one in measure(shape, "cuda", torch.bfloat16, do_bench, rate)]
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_per_s": rate / 1e9}
    arguments.record.write_text(json.dumps({**record, "shape": sizes, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
