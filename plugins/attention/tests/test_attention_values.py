"""Every attention against the contract's formula in float64, over shapes, windows, caps, chunks and block sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm_attention.naive import NaiveAttention
from pluglm_attention.sdpa import SdpaAttention

# float32: sums of a few hundred products of unit normals. bfloat16: one rounding (2**-8) of result and weights.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

SHAPES = [(1, 1, 16), (4, 4, 64), (4, 1, 20), (6, 2, 33), (9, 3, 64), (8, 1, 256), (32, 8, 16), (8, 8, 7)]
KINDS = [(NaiveAttention, False), (NaiveAttention, True), (SdpaAttention, False)]

# Sequence lengths and steps: prefill, cached prefixes, decode, and all of them in one batch.
LENGTHS = (37, 5, 70)
STEPS = [[(0, 20), (1, 4)], [(0, 1), (1, 1), (2, 64)], [(0, 15), (2, 1)], [(0, 1), (2, 1)], [(2, 4)]]


def check(world: Any, kind: type[Any], deterministic: bool, layer: Any, dtype: torch.dtype, block_size: int) -> None:
    attention = world.build(kind, layer, str(dtype).removeprefix("torch."), deterministic)
    sequences = [world.tokens(layer, count, seed, dtype) for seed, count in enumerate(LENGTHS)]
    outputs = world.run(attention, layer, sequences, STEPS, block_size)
    for tokens, out_PNH in zip(sequences, outputs, strict=True):
        assert out_PNH.dtype == dtype
        torch.testing.assert_close(
            out_PNH.double(), world.reference(layer, tokens), rtol=0, atol=TOLERANCE[dtype], check_dtype=False
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "deterministic"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes(
    world: Any, shape: tuple[int, int, int], kind: type[Any], deterministic: bool, dtype: torch.dtype
) -> None:
    check(world, kind, deterministic, world.layer(*shape), dtype, block_size=16)


@pytest.mark.parametrize("block_size", [1, 3, 64, 128])
@pytest.mark.parametrize(("kind", "deterministic"), KINDS)
def test_block_sizes(world: Any, block_size: int, kind: type[Any], deterministic: bool) -> None:
    check(world, kind, deterministic, world.layer(4, 2, 24), torch.float32, block_size)


@pytest.mark.parametrize("window", [1, 2, 16, 33, 69, 70, 1000])
@pytest.mark.parametrize(("kind", "deterministic"), KINDS)
def test_sliding_windows(world: Any, window: int, kind: type[Any], deterministic: bool) -> None:
    check(world, kind, deterministic, world.layer(4, 2, 32, window=window), torch.float32, 16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_soft_cap_of_the_reference(world: Any, window: int | None, deterministic: bool) -> None:
    layer = world.layer(4, 2, 32, window=window, soft_cap=1.5)
    check(world, NaiveAttention, deterministic, layer, torch.float32, 16)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [None, 300])
def test_long_decode_batch_of_sdpa(world: Any, scattered: bool, window: int | None) -> None:
    layer = world.layer(4, 2, 16, window=window)
    sequences = [world.tokens(layer, count, count) for count in (402, 350)]
    steps = [[(0, 400), (1, 348)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]
    outputs = world.run(world.build(SdpaAttention, layer), layer, sequences, steps, 16, scattered)
    for tokens, out_PNH in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(out_PNH.double(), world.reference(layer, tokens), rtol=0, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule(world: Any, data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    window = data.draw(st.none() | st.integers(1, 40))
    layer = world.layer(kv_heads * group, kv_heads, data.draw(st.integers(2, 40)), window=window)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    steps, left = [], list(lengths)
    while any(left):
        wanted = [(i, min(n, data.draw(st.sampled_from([1, 1, 7, 40])))) for i, n in enumerate(left) if n]
        for sequence, count in wanted:
            left[sequence] -= count
        steps.append(wanted)
    kind, deterministic = data.draw(st.sampled_from(KINDS))
    sequences = [world.tokens(layer, count, seed) for seed, count in enumerate(lengths)]
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    outputs = world.run(world.build(kind, layer, "float32", deterministic), layer, sequences, steps, block_size)
    for tokens, out_PNH in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(out_PNH.double(), world.reference(layer, tokens), rtol=0, atol=2e-5)
