"""The deterministic reference attention gives a row the same bits however its sequence is cut, stored and batched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_tools import native_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm_attention.flash import FlashAttention
from pluglm_attention.naive import NaiveAttention
from pluglm_attention.paged import PagedAttention

LENGTH = 150
SHAPES = [(9, 3, 64, {}), (4, 4, 20, {}), (7, 1, 33, {"soft_cap": 2.0}), (1, 1, 5, {}), (8, 2, 64, {"window": 50})]


def chunks(sequence: int, size: int) -> list[list[tuple[int, int]]]:
    return [[(sequence, min(size, LENGTH - first))] for first in range(0, LENGTH, size)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunks_and_block_sizes(world: Any, threads: Any, shape: tuple[Any, ...], num_threads: int) -> None:
    layer = world.layer(*shape[:3], **shape[3])
    attention = world.build(NaiveAttention, layer, deterministic=True)
    tokens = world.tokens(layer, LENGTH, 0)
    threads(1)
    expected = world.run(attention, layer, [tokens], [[(0, LENGTH)]], block_size=LENGTH, scattered=False)[0]
    threads(num_threads)
    # Two threads on a busy machine are slow; a few cuts show whether they split the work differently.
    for chunk_size in (1, 7, 16, 64, LENGTH) if num_threads == 1 else (7, LENGTH):
        for block_size in (1, 16, 64) if num_threads == 1 else (16,):
            out = world.run(attention, layer, [tokens], chunks(0, chunk_size), block_size)[0]
            assert torch.equal(out, expected), (chunk_size, block_size)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("num_mates", [1, 3, 15])
def test_batch_mates(world: Any, shape: tuple[Any, ...], num_mates: int) -> None:
    layer = world.layer(*shape[:3], **shape[3])
    attention = world.build(NaiveAttention, layer, deterministic=True)
    sequences = [world.tokens(layer, LENGTH, 0)]
    expected = world.run(attention, layer, sequences, [[(0, LENGTH)]], 16)[0]
    sequences += [world.tokens(layer, 3 + 5 * i, i) for i in range(1, num_mates + 1)]
    mates = [(i, len(sequences[i])) for i in range(1, num_mates + 1)]
    mixed = [[*mates[: num_mates // 2], (0, 140), *mates[num_mates // 2 :]], *[[(0, 1)]] * 10]
    assert torch.equal(world.run(attention, layer, sequences, mixed, 16)[0], expected)


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=12), block_size=st.integers(1, 80))
def test_any_cuts(world: Any, cuts: set[int], block_size: int) -> None:
    layer = world.layer(6, 2, 24, window=70)
    attention = world.build(NaiveAttention, layer, deterministic=True)
    tokens = world.tokens(layer, LENGTH, 3)
    expected = world.run(attention, layer, [tokens], [[(0, LENGTH)]], LENGTH)[0]
    edges = [0, *sorted(cuts), LENGTH]
    steps = [[(0, after - before)] for before, after in pairwise(edges)]
    assert torch.equal(world.run(attention, layer, [tokens], steps, block_size)[0], expected)


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_plugins_with_kernels_give_the_bits_of_the_reference(world: Any, cls: type[Any]) -> None:
    """Where no native kernel runs, deterministic runs have naive's arithmetic."""
    layer = world.layer(*SHAPES[-1][:3], **SHAPES[-1][3])
    tokens = world.tokens(layer, LENGTH, 0)
    expected = world.run(world.build(NaiveAttention, layer, deterministic=True), layer, [tokens], chunks(0, LENGTH), 16)
    found = world.run(world.build(cls, layer, deterministic=True), layer, [tokens], chunks(0, 11), 7)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_kernels_keep_the_bits(world: Any, shape: tuple[Any, ...], num_threads: int) -> None:
    """Of paged in deterministic runs: over chunks, block sizes and batch mates, on one thread and on two."""
    layer = world.layer(*shape[:3], **shape[3])
    tools = [native_tools(1), native_tools(num_threads)]
    one, many = (world.build(PagedAttention, layer, deterministic=True, tools=each) for each in tools)
    sequences = [world.tokens(layer, LENGTH, 0), *(world.tokens(layer, 3 + 20 * i, i) for i in range(1, 5))]
    expected = world.run(one, layer, sequences[:1], [[(0, LENGTH)]], LENGTH, scattered=False)[0]
    for chunk_size, block_size in ((1, 16), (7, 1), (16, 64), (64, 16), (LENGTH, 5)):
        assert torch.equal(world.run(many, layer, sequences[:1], chunks(0, chunk_size), block_size)[0], expected)
    mates = [(i, len(sequences[i])) for i in range(1, 5)]
    mixed = [[*mates[:2], (0, 140), *mates[2:]], *[[(0, 1)]] * 10]
    assert torch.equal(world.run(many, layer, sequences, mixed, 16)[0], expected)


def test_the_promise_is_declared() -> None:
    assert "numerics:batch_invariant" in NaiveAttention.capabilities(NaiveAttention.Config()).provides
