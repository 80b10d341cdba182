"""Writing keys and values to slots, plain and quantised, and attention over quantised storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pluglm_attention.triton.launch import launch_unified
from pluglm_attention.triton.launch_scatter import launch_scatter
from pluglm_attention.triton.plan import KVScales, plan_paged

E4M3 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, E4M3: 448.0}
SLOTS = torch.tensor([7, 2, -1, 11, 0])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(x_TKH: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_TK as torch computes them."""
    scale_TK = (x_TKH.float().abs().amax(-1) / LARGEST[dtype]).clamp(min=1e-12)
    codes = (x_TKH.float() / scale_TK[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale_TK


def quantised_store(slots: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Any, Any, KVScales]:
    keys = torch.zeros((slots, heads, head_dim), dtype=dtype)
    return keys, keys.clone(), KVScales(*(torch.full((slots, heads), float("nan")) for _ in range(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 80), (20, 128)])
def test_rows_go_to_their_slots_and_nowhere_else(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """k and v are parts of one wider tensor; the third token has no slot."""
    both = random(5, 2 * heads, head_dim, dtype=dtype)
    around = torch.full((2, 14, heads, head_dim), 5.0, dtype=dtype)
    keys, values = around[:, 1:13]
    expected = (keys.clone(), keys.clone())
    launch_scatter(both[:, :heads], both[:, heads:], SLOTS, keys, values)
    known = SLOTS >= 0
    expected[0][SLOTS[known]], expected[1][SLOTS[known]] = both[known, :heads], both[known, heads:]
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    assert (around[:, [0, 13]] == 5.0).all()


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_codes_and_scales_are_those_of_torch(dtype: torch.dtype, source: torch.dtype) -> None:
    k, v = random(5, 3, 80, dtype=source), random(5, 3, 80, dtype=source, seed=1) * 30
    keys, values, scales = quantised_store(12, 3, 80, dtype)
    launch_scatter(k, v, SLOTS, keys, values, scales)
    known = SLOTS >= 0
    for x, stored, scale_SK in ((k, keys, scales.k_SK), (v, values, scales.v_SK)):
        codes, scale_TK = quantised(x[known], dtype)
        assert torch.equal(scale_SK[SLOTS[known]], scale_TK)
        assert torch.equal(stored[SLOTS[known]].float(), codes.float())
        assert scale_SK.isnan().sum() == (12 - 4) * 3


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_zeros_and_extremes(dtype: torch.dtype) -> None:
    """A head of zeros has scale 1e-12 and codes 0; the largest magnitude of others is the range's end, and no NaN."""
    k = torch.zeros((5, 2, 64))
    k[:, 1, 0], k[:, 1, 1] = 3e38, -3e38
    keys, values, scales = quantised_store(12, 2, 64, dtype)
    launch_scatter(k, k, SLOTS, keys, values, scales)
    assert torch.equal(scales.k_SK[7, 0], torch.tensor(1e-12))
    assert torch.equal(keys[7, 0].float(), torch.zeros(64))
    assert keys[7, 1, :3].float().tolist() == [LARGEST[dtype], -LARGEST[dtype], 0.0]


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_a_spoilt_head_is_not_hidden(dtype: torch.dtype, spoilt: float) -> None:
    """Its scale is NaN and its codes are 0; the other heads and tokens are as they were."""
    k = random(5, 3, 64)
    k[1, 2, 9] = spoilt
    keys, values, scales = quantised_store(12, 3, 64, dtype)
    launch_scatter(k, k, SLOTS, keys, values, scales)
    assert scales.k_SK[2, 2].isnan()
    assert torch.equal(keys[2, 2].float(), torch.zeros(64))
    for token, head in ((1, 0), (1, 1), (0, 2)):
        codes, scale = quantised(k[token, head][None, None], dtype)
        assert torch.equal(keys[SLOTS[token], head].float(), codes[0, 0].float())
        assert scales.k_SK[SLOTS[token], head] == scale


def test_ties_go_to_even() -> None:
    """Codes 0.5, 1.5, 2.5, -0.5, -1.5 of a head whose largest value is 127: scale 1."""
    k = torch.zeros((1, 1, 16))
    k[0, 0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    keys, values, scales = quantised_store(1, 1, 16, torch.int8)
    launch_scatter(k, k, torch.tensor([0]), keys, values, scales)
    assert keys[0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_attention_over_quantised_storage(
    world: Any, store: Any, small_tiles: Any, dtype: torch.dtype, num_splits: int, source: torch.dtype
) -> None:
    """Exact attention over what torch's quantisation of the same keys and values stands for."""
    sizes = ((40, 1), (20, 2)) if num_splits > 1 else ((0, 19), (40, 1), (17, 6))
    stored = store(world.layer(4, 2, 80), sizes, dtype=source)
    keys, values, scales = quantised_store(*stored.keys.shape, dtype)
    exact = []
    for segment, tokens in zip(stored.segments, stored.sequences, strict=True):
        launch_scatter(tokens.k, tokens.v, stored.slots(segment), keys, values, scales)
        k, v = (
            codes.double() * scale[..., None] for codes, scale in (quantised(x, dtype) for x in (tokens.k, tokens.v))
        )
        exact.append(dataclasses.replace(tokens, k=k, v=v))
    plan = plan_paged(stored.segments, stored.block_size, torch.device("cpu"))
    out_TNH = launch_unified(
        stored.layer, stored.q, keys, values, plan, scales=scales, num_splits=num_splits, table=small_tiles
    )
    dataclasses.replace(stored, sequences=exact).check(out_TNH)
