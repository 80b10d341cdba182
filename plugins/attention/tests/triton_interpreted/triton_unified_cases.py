"""Paged attention of mixed batches: shapes, dtypes, windows, soft caps, block sizes, filled-up plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pluglm.kernel.core import Segment
from pluglm_attention.triton.launch import launch_unified
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE
from pluglm_attention.triton.plan import TritonPlan, plan_paged
from pluglm_attention.triton.tiles import find_tile

# Prefill, decode, verification of a draft behind a context, a first token, decode right behind a whole tile.
MIXED = ((0, 19), (30, 1), (17, 6), (0, 1), (16, 1))
SHORT = ((0, 9), (17, 1), (14, 4))
CPU = torch.device("cpu")


def plan(stored: Any, **sizes: int) -> TritonPlan:
    return plan_paged(stored.segments, stored.block_size, CPU, **sizes)


def check(stored: Any, **options: Any) -> None:
    out_TNH = launch_unified(stored.layer, stored.q, stored.keys, stored.values, plan(stored), **options)
    stored.check(out_TNH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mixed_batch(world: Any, store: Any, small_tiles: Any, dtype: torch.dtype) -> None:
    check(store(world.layer(4, 2, 64), MIXED, dtype=dtype), table=small_tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 64), (4, 1, 80), (6, 2, 128), (8, 1, 256), (5, 1, 96), (20, 1, 33)], ids=str)
def test_shapes(world: Any, store: Any, small_tiles: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The last has more query heads of a kv head than a tile has rows."""
    check(store(world.layer(*shape), SHORT, dtype=dtype), table=small_tiles)


@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
def test_block_sizes(world: Any, store: Any, small_tiles: Any, block_size: int) -> None:
    check(store(world.layer(2, 1, 64), SHORT, block_size), table=small_tiles)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 33, 1000])
def test_windows(world: Any, store: Any, small_tiles: Any, window: int) -> None:
    check(store(world.layer(2, 1, 64, window=window), ((0, 40), (45, 1))), table=small_tiles)


@pytest.mark.parametrize("window", [1, 20])
def test_keys_before_the_window_are_not_read(world: Any, store: Any, small_tiles: Any, window: int) -> None:
    stored = store(world.layer(2, 1, 64, window=window), ((60, 3),))
    for tensor in (stored.keys, stored.values):
        tensor[stored.slots(stored.segments[0])[: 60 - window + 1]] = float("nan")
    check(stored, table=small_tiles)


@pytest.mark.parametrize("more", [{"soft_cap": 1.5}, {"soft_cap": 30.0, "window": 9}], ids=str)
def test_soft_caps(world: Any, store: Any, small_tiles: Any, more: dict[str, Any]) -> None:
    check(store(world.layer(2, 1, 64, **more), SHORT), table=small_tiles)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy's; infinity is what the formula wants there
def test_large_scores_reach_the_soft_cap(world: Any, store: Any, small_tiles: Any) -> None:
    stored = store(world.layer(2, 1, 64, soft_cap=2.0), SHORT)
    stored.q.mul_(1e4)
    for tokens in stored.sequences:
        tokens.q.mul_(1e4)
    check(stored, table=small_tiles)


@pytest.mark.parametrize("sizes", [((0, 70),), ((70, 1), (3, 1))], ids=["prefill", "decode"])
def test_default_tiles(world: Any, store: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    check(store(world.layer(2, 1, 64), sizes, dtype=torch.float16), table=DEFAULT_TABLE)


def test_queries_may_be_part_of_a_larger_tensor(world: Any, store: Any, small_tiles: Any) -> None:
    stored = store(world.layer(4, 2, 64), SHORT)
    wide = torch.cat((stored.q, torch.full_like(stored.q, float("nan"))), dim=1)
    out_TNH = launch_unified(stored.layer, wide[:, :4], stored.keys, stored.values, plan(stored), table=small_tiles)
    stored.check(out_TNH)


def test_segments_without_queries(world: Any, store: Any, small_tiles: Any) -> None:
    check(store(world.layer(2, 1, 64), ((5, 0), (0, 12), (8, 0), (8, 1), (3, 0))), table=small_tiles)
    check(store(world.layer(2, 1, 64), ((5, 0), (8, 1))), table=small_tiles)


def test_rows_filled_in_get_zeros(world: Any, store: Any, small_tiles: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((20, 1), (7, 1)))
    q = torch.cat((stored.q, torch.full_like(stored.q, float("nan"))))
    filled = plan(stored, num_segments=4, max_blocks=5)
    out_TNH = launch_unified(stored.layer, q, stored.keys, stored.values, filled, table=small_tiles)
    assert torch.equal(out_TNH[2:], torch.zeros_like(out_TNH[2:]))
    stored.check(out_TNH[:2])


def test_a_plan_takes_over_another(world: Any, store: Any, small_tiles: Any) -> None:
    layer = world.layer(2, 1, 64)
    mine, other = store(layer, ((20, 1),)), store(layer, ((33, 1), (5, 1)))
    captured = plan(mine, num_segments=2, max_blocks=3)
    captured.update(plan(other, num_segments=2, max_blocks=3))
    other.check(launch_unified(layer, other.q, other.keys, other.values, captured, table=small_tiles))


@triton.jit
def tile_kernel(cu_query, num_segments, out, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    segment, first = find_tile(cu_query, num_segments, tile, BLOCK_Q, False)
    tl.store(out + 2 * tile, segment)
    tl.store(out + 2 * tile + 1, first)


def test_every_tile_is_found_among_many_segments() -> None:
    """280 segments are more than one search step takes. Each tile of each must be found once."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 4, (280,), generator=generator).tolist()
    sizes[200:203] = [40, 0, 17]
    cu_query = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    num_tiles = int(cu_query[-1]) // 8 + len(sizes)
    out = torch.full((num_tiles, 2), -1, dtype=torch.int32)
    tile_kernel[(num_tiles,)](cu_query, len(sizes), out, BLOCK_Q=8)
    found = [(segment, first) for segment, first in out.tolist() if first < sizes[segment]]
    assert found == [(segment, first) for segment, size in enumerate(sizes) for first in range(0, size, 8)]


def test_segments_must_follow_one_another() -> None:
    later = Segment(sequence_id=7, query_start=1, num_query=1, num_context=0, block_table=(0,))
    with pytest.raises(ValueError, match="segment 7 starts at row 1, not at 0"):
        plan_paged([later], 16, CPU)
