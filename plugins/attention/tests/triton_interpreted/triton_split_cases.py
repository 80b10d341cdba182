"""Decode with the keys in several parts, and the sum over the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm_attention.triton.launch import launch_unified
from pluglm_attention.triton.plan import plan_paged

DECODE = ((66, 1), (15, 1), (0, 1), (31, 3))


def check(stored: Any, num_splits: int, small_tiles: Any) -> None:
    plan = plan_paged(stored.segments, stored.block_size, torch.device("cpu"))
    out_TNH = launch_unified(
        stored.layer, stored.q, stored.keys, stored.values, plan, num_splits=num_splits, table=small_tiles
    )
    stored.check(out_TNH)


@pytest.mark.parametrize("num_splits", [2, 3, 5, 8])
def test_numbers_of_splits(world: Any, store: Any, small_tiles: Any, num_splits: int) -> None:
    """Short segments leave parts without a key."""
    check(store(world.layer(4, 2, 64), DECODE), num_splits, small_tiles)


def test_more_splits_than_the_sum_takes_at_a_time(world: Any, store: Any, small_tiles: Any) -> None:
    check(store(world.layer(2, 1, 16), ((290, 1),)), 19, small_tiles)


@pytest.mark.parametrize("shape", [(3, 1, 80), (8, 1, 128)], ids=str)
def test_shapes_in_float16(world: Any, store: Any, small_tiles: Any, shape: tuple[int, int, int]) -> None:
    check(store(world.layer(*shape), ((50, 1), (20, 2)), dtype=torch.float16), 3, small_tiles)


@pytest.mark.parametrize("window", [3, 17, 40])
def test_windows_with_a_soft_cap(world: Any, store: Any, small_tiles: Any, window: int) -> None:
    check(store(world.layer(2, 1, 64, window=window, soft_cap=3.0), DECODE, block_size=4), 3, small_tiles)


def test_rows_filled_in_get_zeros(world: Any, store: Any, small_tiles: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((40, 1),))
    q = torch.cat((stored.q, torch.full_like(stored.q, float("nan"))))
    plan = plan_paged(stored.segments, 16, torch.device("cpu"), num_segments=2)
    out_TNH = launch_unified(stored.layer, q, stored.keys, stored.values, plan, num_splits=2, table=small_tiles)
    assert torch.equal(out_TNH[1], torch.zeros_like(out_TNH[1]))
    stored.check(out_TNH[:1])
