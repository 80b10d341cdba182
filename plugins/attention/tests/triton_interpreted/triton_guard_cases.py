"""What the launchers refuse, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm_attention.triton import unavailable
from pluglm_attention.triton.launch import launch_flash, launch_unified
from pluglm_attention.triton.launch_scatter import launch_scatter
from pluglm_attention.triton.plan import KVScales, plan_flash, plan_paged

CPU = torch.device("cpu")


def paged(stored: Any, **changes: Any) -> None:
    given = {"q": stored.q, "keys": stored.keys, "values": stored.values, "scales": None} | changes
    plan = plan_paged(stored.segments, stored.block_size, CPU)
    launch_unified(stored.layer, given["q"], given["keys"], given["values"], plan, scales=given["scales"])


def test_the_interpreter_is_available() -> None:
    assert unavailable() is None


def test_bfloat16_is_refused_in_the_interpreter(world: Any, store: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((0, 2),), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        paged(stored)
    with pytest.raises(ValueError, match="bfloat16"):
        launch_flash(stored.layer, stored.q, stored.keys, stored.values, plan_flash(stored.segments, [0], CPU))
    with pytest.raises(ValueError, match="bfloat16"):
        launch_scatter(stored.keys[:1], stored.keys[:1], torch.tensor([0]), stored.keys, stored.values)


def test_tensors_that_do_not_fit_the_layer(world: Any, store: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((0, 2),))
    with pytest.raises(ValueError, match=r"q should be \[rows, 2, 64\].*\(2, 1, 64\)"):
        paged(stored, q=stored.q[:, :1])
    with pytest.raises(ValueError, match=r"keys should be .* with strides \(1,"):
        paged(stored, keys=stored.keys.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    with pytest.raises(ValueError, match="q has 1 rows, and the plan is of 2"):
        paged(stored, q=stored.q[:1])
    with pytest.raises(ValueError, match="float64"):
        paged(stored, q=stored.q.double())


def test_storage_and_scales_must_agree(world: Any, store: Any) -> None:
    stored = store(world.layer(2, 1, 64), ((0, 2),))
    scales = KVScales(torch.ones((16, 1)), torch.ones((16, 1)))
    codes = torch.zeros((16, 1, 64), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"without scales must be torch\.float32, not torch\.int8"):
        paged(stored, keys=codes, values=codes)
    with pytest.raises(ValueError, match="with scales must be of"):
        paged(stored, scales=scales)
    with pytest.raises(ValueError, match="must be the same"):
        paged(stored, keys=codes, scales=scales)
    with pytest.raises(ValueError, match=r"scales should be float32 \(16, 1\)"):
        paged(stored, keys=codes, values=codes, scales=KVScales(torch.ones((16, 1)), torch.ones((15, 1))))


def test_head_dims_above_the_table(world: Any, store: Any) -> None:
    with pytest.raises(ValueError, match="head dims up to 256, not 257"):
        paged(store(world.layer(1, 1, 257), ((0, 1),)))


def test_slots_and_storage_of_scatter() -> None:
    k, keys = torch.zeros((2, 1, 16)), torch.zeros((4, 1, 16))
    with pytest.raises(ValueError, match=r"slots should be int64 \[2\]"):
        launch_scatter(k, k, torch.tensor([0, 1], dtype=torch.int32), keys, keys)
    with pytest.raises(ValueError, match=r"does not hold rows of \(1, 16\)"):
        launch_scatter(k, k, torch.tensor([0, 1]), torch.zeros((4, 2, 16)), keys)
    with pytest.raises(ValueError, match="k is"):
        launch_scatter(k, k[:1], torch.tensor([0, 1]), keys, keys)
