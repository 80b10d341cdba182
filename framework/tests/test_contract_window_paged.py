"""The contract kit on the window-paged KV manager, with windows in the model and without; long walks over its pools."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pluglm.kv.window_paged import WindowPagedKV
from pluglm.testing.check import Check, cases, run_checks
from pluglm.testing.context import make_context, small_spec
from pluglm.testing.kv import kv_checks
from pluglm.testing.kv_groups import LONG, MAX_STEP_TOKENS, windowed_spec
from pluglm.testing.kv_groups_desk import Desk


@pytest.mark.parametrize("check", **cases(kv_checks(WindowPagedKV)))
def test_window_paged_kv(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("window", [None, 8, 40])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_of_other_block_sizes_and_one_kind_of_layer(block_size: int, window: int | None) -> None:
    """With one group the pool is of one kind, so everything that the kit says of blocks holds with a window too."""
    config = WindowPagedKV.Config(block_size=block_size)
    report = run_checks(kv_checks(WindowPagedKV, config, spec=small_spec(window=window)))
    assert report.ok, str(report)


def manager(block_size: int, num_blocks: int) -> Any:
    config = WindowPagedKV.Config(block_size=block_size, num_blocks=num_blocks, num_windows=2)
    spec = windowed_spec()
    token_bytes = spec.kv_values_per_token * 4
    fields = {"max_model_len": LONG, "max_step_tokens": MAX_STEP_TOKENS, "bytes_per_token": token_bytes}
    return WindowPagedKV(config, make_context(spec=spec, kv_bytes=1 << 40, **fields))


@pytest.mark.parametrize("seed", range(12))
def test_walks_in_pools_that_are_often_full(seed: int) -> None:
    """Prompts up to 600 tokens in pools for about one: every group reads back what the next query sees, every time."""
    block_size = (1, 8, 16, 48)[seed % 4]
    desk = Desk(manager(block_size, 800 // block_size))
    generator = random.Random(seed)
    for step in range(250):
        desk.random_step(step, generator, LONG, MAX_STEP_TOKENS)
        desk.manager.audit()
        for sequence_id in desk.texts:
            desk.expect_seen(sequence_id, f"in step {step}")
    for sequence_id in list(desk.texts):
        desk.release(sequence_id)
    assert desk.manager.capacity().held_blocks == 0
