"""Attention over consecutive keys: variable lengths, cached prefixes, gathered keys and keys read in the storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm_attention.triton.launch import launch_flash
from pluglm_attention.triton.plan import FlashPlan, plan_flash

MIXED = ((0, 19), (30, 1), (17, 6), (0, 1))


def plan(stored: Any, first_rows: list[int]) -> FlashPlan:
    return plan_flash(stored.segments, first_rows, torch.device("cpu"))


def check_in_storage(stored: Any, table: Any) -> None:
    first_rows = [segment.block_table[0] * stored.block_size for segment in stored.segments]
    out_TNH = launch_flash(stored.layer, stored.q, stored.keys, stored.values, plan(stored, first_rows), table=table)
    stored.check(out_TNH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 80), (2, 2, 128), (8, 1, 256)], ids=str)
def test_shapes(world: Any, store: Any, small_tiles: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_in_storage(store(world.layer(*shape), MIXED, dtype=dtype, scattered=False), small_tiles)


@pytest.mark.parametrize("more", [{"window": 1}, {"window": 20}, {"soft_cap": 2.0}, {"window": 16, "soft_cap": 9.0}])
def test_windows_and_soft_caps(world: Any, store: Any, small_tiles: Any, more: dict[str, Any]) -> None:
    check_in_storage(store(world.layer(2, 1, 64, **more), ((0, 40), (33, 9)), scattered=False), small_tiles)


def test_gathered_keys(world: Any, store: Any, small_tiles: Any) -> None:
    """Rows of scattered blocks gathered one segment behind the other, in a tensor with longer rows."""
    stored = store(world.layer(4, 2, 64), MIXED, block_size=4)
    slots = torch.cat([stored.slots(segment) for segment in stored.segments])
    wide = torch.cat((stored.keys[slots], stored.values[slots]), dim=1)
    lengths = torch.tensor([0, *[segment.num_keys for segment in stored.segments]])
    first_rows = lengths.cumsum(0)[:-1].tolist()
    out_TNH = launch_flash(
        stored.layer, stored.q, wide[:, :2], wide[:, 2:], plan(stored, first_rows), table=small_tiles
    )
    stored.check(out_TNH)


def test_default_tiles(world: Any, store: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((0, 70), (64, 66)), dtype=torch.float16, scattered=False)
    first_rows = [segment.block_table[0] * stored.block_size for segment in stored.segments]
    stored.check(launch_flash(stored.layer, stored.q, stored.keys, stored.values, plan(stored, first_rows)))
