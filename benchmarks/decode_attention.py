"""How fast native decode attention reads keys and values, as a share of how fast this machine reads memory.

    python benchmarks/decode_attention.py [--threads 1 2] [--rounds 5] [--record FILE.json]

bfloat16, 9 query heads on 3 kv heads of 64 values (the default model's), blocks of 16 tokens, one query a sequence,
30 layers in turn so that no cache holds them. Tables are in order, as a quiet pool hands out blocks, or scattered, as
an old one does. Cases take turns; a share is of the read bandwidth that was measured in the same run. Prints a table
and writes a JSON record with every sample.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from command_line import parser_of, whole, write_record
from rich.console import Console
from rich.table import Table

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys
from pluglm.native.probe import read_bandwidth
from pluglm.native.tools import NativeTools

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30
SPEC = LayerSpec(index=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
BYTES_OF_KEY = 2 * KV_HEADS * HEAD_DIM * 2  # and its value, all heads
CASES = [(batch, context) for batch, context in ((1, 4096), (8, 512), (32, 64), (32, 512))]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "decode_attention.json")
    parser.add_argument("--threads", type=whole, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=whole, default=5)
    return parser.parse_args()


def prepare(tools: NativeTools, batch: int, context: int, is_scattered: bool) -> Callable[[], None]:
    """One decode step's attention, all layers."""
    attention = NativeAttention(tools)
    blocks = context // BLOCK + 1
    order = list(range(batch * blocks))
    if is_scattered:
        random.Random(0).shuffle(order)
    segments = [
        Segment(
            sequence_id=i,
            query_start=i,
            num_query=1,
            num_context=context,
            block_table=tuple(order[i * blocks : (i + 1) * blocks]),
        )
        for i in range(batch)
    ]
    slots_T = torch.tensor([slot for segment in segments for slot in segment.slots(BLOCK, context)])
    shape = (batch * blocks * BLOCK, KV_HEADS, HEAD_DIM)
    stores = [[tools.empty(shape, torch.bfloat16).normal_() for _ in range(2)] for _ in range(LAYERS)]
    projected = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
    q_TNH, k_TKH, v_TKH = projected.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
    table, new = attention.plan(segments, BLOCK), NewKeys(k_TKH, v_TKH, slots_T)

    def step() -> None:
        for keys, values in stores:
            attention.attend(SPEC, q_TNH, table, keys, values, new)

    return step


def measure(threads: int, rounds: int) -> dict[str, Any]:
    tools = NativeTools(threads)
    found: dict[str, Any] = {"threads": threads, "level": tools.level, "read_gb_s": [], "cases": {}}
    for batch, context in CASES:
        steps = {name: prepare(tools, batch, context, name == "scattered") for name in ("in order", "scattered")}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 1):
            found["read_gb_s"].append(read_bandwidth(tools, 256 << 20, 2) / 1e9)
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                if number:  # the first touches the memory
                    seconds[name].append(time.perf_counter() - started)
        num_bytes = LAYERS * batch * (context + 1) * BYTES_OF_KEY
        for name, values in seconds.items():
            found["cases"][f"batch{batch}_context{context}, {name}"] = {
                "seconds": values,
                "gb_s": num_bytes / statistics.median(values) / 1e9,
            }
    found["median_read_gb_s"] = statistics.median(found["read_gb_s"])
    return found


def show(found: dict[str, Any]) -> Table:
    bound = found["median_read_gb_s"]
    table = Table(title=f"{found['threads']} thread(s), level {found['level']}; memory is read at {bound:.1f} GB/s")
    for name in ("case", "GB/s", "share"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name, case in found["cases"].items():
        table.add_row(name, f"{case['gb_s']:.1f}", f"{case['gb_s'] / bound:.2f}")
    return table


def main() -> None:
    options = parse()
    runs = [measure(threads, options.rounds) for threads in options.threads]
    console = Console()
    for run in runs:
        console.print(show(run))
    record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "runs": runs}
    write_record(options.record, record)


if __name__ == "__main__":
    main()
