"""Measures launch configs on a GPU and writes the fastest as a table. Not measured yet: it was never run on a GPU.

python -m pluglm_attention.triton.autotune TABLE.json --heads 32 --kv-heads 8 --head-dim 128
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.triton import unavailable
from pluglm_attention.triton.launch_configs import (
    DEFAULT_TABLE,
    HEAD_DIMS,
    Kernel,
    Key,
    LaunchConfig,
    LaunchTable,
    capability_class,
    write_table,
)

Timer = Callable[[Callable[[], object]], float]

BLOCK_SIZE = 16
# (cached tokens, new tokens) of each sequence: long prompts and one behind a prefix; and a batch of decode.
PROMPTS = ((0, 4096), (2048, 2048))
DECODES = ((4096, 1),) * 32


def candidates(kernel: Kernel) -> Iterator[LaunchConfig]:
    """What is worth a try; those that a device cannot hold are left out when they fail."""
    rows = (16,) if kernel == "decode" else (16, 32) if kernel == "float32" else (64, 128)
    for block_m, block_n, num_warps in itertools.product(rows, (16, 32, 64, 128), (4, 8)):
        for num_stages in (1, 2, 3, 4):
            yield LaunchConfig(block_m, block_n, num_warps, num_stages)


def fastest(run: Callable[[LaunchConfig], object], options: Iterator[LaunchConfig], timer: Timer) -> LaunchConfig:
    """The option whose run takes the least time. Options that do not fit the device are skipped; ValueError if all."""
    from triton import OutOfResources  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.runtime.errors import PTXASError  # type: ignore[import-not-found, import-untyped, unused-ignore]

    times: dict[LaunchConfig, float] = {}
    for config in options:
        try:
            times[config] = timer(lambda config=config: run(config))  # type: ignore[misc]
        except (OutOfResources, PTXASError):
            continue
    if not times:
        raise ValueError("no launch config fits the device")
    return min(times, key=lambda config: times[config])


def tune(
    layer: LayerSpec,
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer,
    *,
    prompts: tuple[tuple[int, int], ...] = PROMPTS,
    decodes: tuple[tuple[int, int], ...] = DECODES,
    options: Callable[[Kernel], Iterator[LaunchConfig]] = candidates,
) -> LaunchTable:
    """The entries for this layer's head dim and the device's capability; quantised: with int8 storage."""
    head_dim = min(size for size in HEAD_DIMS if size >= layer.head_dim)
    capability = capability_class(device)
    found: dict[Key, LaunchConfig] = {}
    for kernel in get_args(Kernel):
        run = _workload(kernel, layer, device, dtype, decodes if kernel == "decode" else prompts)
        found[kernel, capability, head_dim] = fastest(run, options(kernel), timer)
    return found


def _workload(
    kernel: Kernel, layer: LayerSpec, device: torch.device, dtype: torch.dtype, sizes: tuple[tuple[int, int], ...]
) -> Callable[[LaunchConfig], object]:
    """A launch of the kernel that takes its tile sizes. Blocks are in order: the order costs nothing on a GPU."""
    from pluglm_attention.triton.launch import launch_flash, launch_unified
    from pluglm_attention.triton.plan import KVScales, plan_flash, plan_paged

    segments, first_block, row = [], 0, 0
    for number, (context, query) in enumerate(sizes):
        table = tuple(range(first_block, first_block - (-(context + query) // BLOCK_SIZE)))
        segments.append(
            Segment(sequence_id=number, query_start=row, num_query=query, num_context=context, block_table=table)
        )
        first_block, row = first_block + len(table), row + query
    dtype = torch.float32 if kernel == "float32" else dtype
    q_TNH = torch.randn((row, layer.num_heads, layer.head_dim), device=device).to(dtype)
    keys, values = torch.randn((2, first_block * BLOCK_SIZE, layer.num_kv_heads, layer.head_dim), device=device)
    if kernel == "flash":
        rows = plan_flash(segments, [one.block_table[0] * BLOCK_SIZE for one in segments], device)
        k_SKH, v_SKH = keys.to(dtype), values.to(dtype)
        return lambda config: launch_flash(layer, q_TNH, k_SKH, v_SKH, rows, table=dict.fromkeys(DEFAULT_TABLE, config))
    plan = plan_paged(segments, BLOCK_SIZE, device)
    scales = None
    if kernel == "quantised":
        scales = KVScales(*torch.full((2, *keys.shape[:2]), 1 / 32, device=device))
        keys, values = (32 * keys).clamp(-127, 127), (32 * values).clamp(-127, 127)
    k_SKH, v_SKH = (x.to(torch.int8 if scales else dtype) for x in (keys, values))
    return lambda config: launch_unified(
        layer, q_TNH, k_SKH, v_SKH, plan, scales=scales, table=dict.fromkeys(DEFAULT_TABLE, config)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the JSON file to write")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    arguments = parser.parse_args()
    if (reason := unavailable()) or not torch.cuda.is_available():
        parser.exit(1, f"nothing to measure: {reason or 'kernels run in the interpreter'}\n")
    from triton.testing import do_bench  # type: ignore[import-not-found, import-untyped, unused-ignore]

    device = torch.device("cuda")
    found: dict[Key, LaunchConfig] = {}
    for head_dim in arguments.head_dim:
        layer = LayerSpec(
            index=0, num_heads=arguments.heads, num_kv_heads=arguments.kv_heads, head_dim=head_dim, scale=head_dim**-0.5
        )
        found.update(tune(layer, device, torch.bfloat16, do_bench))
    write_table(arguments.table, found, torch.cuda.get_device_name(device))


if __name__ == "__main__":
    main()
