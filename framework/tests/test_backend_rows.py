"""Rows in tiles of one shape: same values as all at once, and bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pluglm.backends.linear import DenseLinear, PackedLinear, can_pack
from pluglm.backends.rows import TiledRows, whole_rows

# Shapes of small and middle-sized models, odd ones, and a vocabulary.
SHAPES = [
    (576, 1536),
    (1536, 576),
    (64, 100),
    (33, 17),
    (5, 3),
    (1, 1),
    (100, 7),
    (255, 127),
    (577, 1537),
    (576, 49152),
]


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(0, 70), width=st.integers(1, 9))
def test_tiles_give_every_row_once_and_in_order(num_rows: int, width: int) -> None:
    x = torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width)
    ids = torch.arange(num_rows)

    def function(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.shape[0] != 16:
            raise ValueError(f"a tile of {x.shape[0]} rows")
        return x * 2, ids + 1, x.view(-1, 1, width).expand(-1, 2, -1)

    doubled, plus_one, wide = TiledRows()(function, x, ids)
    assert torch.equal(doubled, x * 2)
    assert torch.equal(plus_one, ids + 1)
    assert torch.equal(wide, torch.stack((x, x), dim=1))


def test_tiles_are_contiguous_and_aligned_whatever_comes_in() -> None:
    wide = torch.randn(40, 21)[3:, ::2]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.full((16, 1), float(x.is_contiguous() and x.data_ptr() % 64 == 0)),)

    assert TiledRows()(function, wide)[0].eq(1).all()


def test_whole_rows_calls_once() -> None:
    calls = []
    x = torch.randn(37, 4)
    (y,) = whole_rows(lambda t: (calls.append(t.shape[0]) or t + 1,), x)
    assert calls == [37]
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [DenseLinear, PackedLinear])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_of_a_row_depend_on_nothing_else(
    threads: Any, shape: tuple[int, int], kind: type[Any], num_threads: int
) -> None:
    if kind is PackedLinear and not can_pack(torch.float32):
        pytest.skip("this build of torch packs no float32 weights")
    width, num_out = shape
    generator = torch.Generator().manual_seed(width)
    linear = kind("w", torch.randn((num_out, width), generator=generator), torch.randn(num_out, generator=generator))
    batch = torch.randn((35, width), generator=generator)
    threads(1)
    (expected,) = TiledRows()(lambda x: (linear(x),), batch)
    threads(num_threads)
    for first, last in [(0, 1), (7, 8), (34, 35), (3, 19), (5, 35), (0, 35)]:
        (part,) = TiledRows()(lambda x: (linear(x),), batch[first:last])
        assert torch.equal(part, expected[first:last]), (first, last)
    (mixed,) = TiledRows()(lambda x: (linear(x),), torch.cat((torch.zeros(9, width), batch[20:21], batch)))
    assert torch.equal(mixed[9], expected[20])


@pytest.mark.parametrize("width", [64, 576, 1536, 4096])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_elementwise_kernels_keep_the_bits_too(threads: Any, width: int, num_threads: int) -> None:
    threads(num_threads)
    batch = torch.randn((35, width), generator=torch.Generator().manual_seed(1))

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return functional.silu(normed) * x, functional.gelu(normed, approximate="tanh")

    expected = TiledRows()(block, batch)
    for first, last in [(0, 1), (15, 16), (17, 33), (34, 35)]:
        for part, whole in zip(TiledRows()(block, batch[first:last]), expected, strict=True):
            assert torch.equal(part, whole[first:last])
