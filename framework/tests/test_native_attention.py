"""Native attention against the definition in float64, and its bits in float32, for every instruction level here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys
from pluglm.native.isa import LEVELS, missing
from pluglm.native.tools import NativeTools

# N: query heads, K: kv heads, H: head dim, T: rows of the batch, S: positions of a sequence

Tools = Callable[..., NativeTools]
RUNNABLE = [level.name for level in LEVELS if missing(level) is None]
NAN = float("nan")

# Relative to the attention over the values' magnitudes. In float32, scores of size 10 round by 1e-6 each, and weights
# follow. Rounding to bfloat16 costs up to 2**-8: once for the result, and once for the weights where the CPU multiplies
# bfloat16; what is left allows for the product of the two and for a power of two that is off by 7.5e-5.
FLOAT32, BFLOAT16 = 2**-18, 2**-7 + 2**-12


@dataclass(frozen=True)
class Text:
    """One sequence: q_SNH, k_SKH and v_SKH of all its positions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Queries at positions start .. stop of a text, whose first `dropped` positions are no longer stored."""

    text: Text
    start: int
    stop: int
    dropped: int = 0


def spec(heads: int, kv_heads: int, head_dim: int, window: int | None = None, cap: float | None = None) -> LayerSpec:
    return LayerSpec(
        index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=cap,
    )


def make_text(layer: LayerSpec, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Text:
    generator = torch.Generator().manual_seed(seed)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    return Text(*(torch.randn(length, count, layer.head_dim, generator=generator).to(dtype) for count in heads))


def slots_of(table: Sequence[int], block_size: int, start: int, stop: int) -> torch.Tensor:
    positions = torch.arange(start, stop)
    return torch.tensor(table, dtype=torch.int64)[positions // block_size] * block_size + positions % block_size


def attend(
    attention: NativeAttention, layer: LayerSpec, chunks: Sequence[Chunk], block_size: int, seed: int = 0
) -> list[torch.Tensor]:
    """out of each chunk. Blocks are shuffled, q, k and v are views, and all that belongs to no chunk is NaN."""
    counts = [-(-(chunk.stop - chunk.dropped) // block_size) for chunk in chunks]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    dtype = chunks[0].text.q.dtype if chunks else torch.float32
    store = torch.full((2, (len(order) + 2) * block_size, kv_heads, head_dim), NAN, dtype=dtype)
    keys, values = store[:, block_size:-block_size]
    num_rows = sum(chunk.stop - chunk.start for chunk in chunks)
    qkv = torch.full((num_rows, heads + 2 * kv_heads + 1, head_dim), NAN, dtype=dtype)
    segments, slots, row = [], [torch.empty(0, dtype=torch.int64)], 0
    for index, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        table, order = tuple(order[:count]), order[count:]
        text, start, stop, dropped = chunk.text, chunk.start, chunk.stop, chunk.dropped
        old = slots_of(table, block_size, 0, start - dropped)
        keys[old], values[old] = text.k[dropped:start], text.v[dropped:start]
        rows, row = slice(row, row + stop - start), row + stop - start
        qkv[rows, :-1] = torch.cat([x[start:stop] for x in (text.q, text.k, text.v)], dim=1)
        slots.append(slots_of(table, block_size, start - dropped, stop - dropped))
        segments.append(
            Segment(
                sequence_id=index,
                query_start=rows.start,
                num_query=stop - start,
                num_context=start - dropped,
                block_table=table,
            )
        )
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads : -1]
    new = NewKeys(k, v, torch.cat(slots))
    out = attention.attend(layer, qkv[:, :heads], attention.plan(segments, block_size), keys, values, new)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert torch.isnan(store[:, :block_size]).all()
    assert torch.isnan(store[:, -block_size:]).all()
    assert torch.equal(keys[new.slots_T], k)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


def exact(layer: LayerSpec, chunk: Chunk, v: torch.Tensor) -> torch.Tensor:
    """The definition in float64, with values v."""
    group, text = layer.num_heads // layer.num_kv_heads, chunk.text
    k, v = (x[: chunk.stop].double().repeat_interleave(group, dim=1) for x in (text.k, v))
    scores = torch.einsum("qnh,snh->nqs", text.q[chunk.start : chunk.stop].double(), k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    distance = torch.arange(chunk.start, chunk.stop)[:, None] - torch.arange(chunk.stop)
    hidden = (distance < 0) | (distance >= (layer.window or 1 << 40))
    return torch.einsum("nqs,snh->qnh", torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), v)


def expect_exact(out: torch.Tensor, layer: LayerSpec, chunk: Chunk) -> None:
    size = exact(layer, chunk, chunk.text.v.abs())
    error = (out.double() - exact(layer, chunk, chunk.text.v)).abs()
    assert bool((error <= (FLOAT32 if out.dtype == torch.float32 else BFLOAT16) * size).all()), (error / size).max()


# layer, (start, stop) of each sequence, block size
GRID = [
    (spec(9, 3, 64), [(0, 1), (63, 64), (64, 65), (511, 512), (512, 513), (4096, 4097)], 16),
    (spec(9, 3, 64), [(0, 300), (1000, 1017), (40, 40), (700, 701)], 16),
    (spec(1, 1, 64), [(0, 130), (129, 130)], 1),
    (spec(32, 4, 64), [(0, 33), (600, 603), (77, 78)], 64),
    (spec(8, 1, 128), [(0, 70), (255, 258), (513, 514)], 256),
    (spec(4, 4, 80), [(0, 66), (90, 91)], 5),
    (spec(6, 2, 96), [(0, 66), (90, 91)], 32),
    (spec(4, 2, 256), [(0, 66), (190, 191)], 16),
    (spec(4, 2, 20), [(3, 50), (90, 91)], 7),
    (spec(3, 3, 5), [(0, 37), (90, 91)], 3),
    (spec(9, 3, 64), [(500, 504), (126, 131), (2, 5), (515, 520)], 16),  # 9 to 15 rows of a kv head
    (spec(8, 2, 192), [(90, 94), (600, 602), (33, 34)], 16),
    (spec(32, 8, 128), [(300, 304), (17, 20)], 16),
    (spec(6, 2, 64, window=100), [(0, 250), (700, 701), (1100, 1150)], 16),
    (spec(6, 2, 64, window=600), [(1400, 1401), (1111, 1131), (1200, 1201)], 16),
    (spec(4, 1, 64, window=1), [(0, 70), (300, 301)], 16),
    (spec(4, 2, 64, cap=3.0), [(0, 150), (700, 701)], 16),
    (spec(4, 2, 256, window=64, cap=20.0), [(0, 150), (700, 701)], 16),
]


@pytest.fixture(params=RUNNABLE)
def attention(request: pytest.FixtureRequest, native_tools: Tools) -> NativeAttention:
    return NativeAttention(native_tools(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layer", "lengths", "block_size"), GRID)
def test_equals_float64(
    attention: NativeAttention, dtype: torch.dtype, layer: LayerSpec, lengths: list[tuple[int, int]], block_size: int
) -> None:
    """All in one batch, and each sequence alone: then its keys are shared among the threads by spans."""
    chunks = [Chunk(make_text(layer, stop, stop, dtype), start, stop) for start, stop in lengths]
    for chunk, out in zip(chunks, attend(attention, layer, chunks, block_size), strict=True):
        if chunk.stop > chunk.start:
            expect_exact(out, layer, chunk)
            expect_exact(attend(attention, layer, [chunk], block_size)[0], layer, chunk)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_scale(attention: NativeAttention, scale: float, dtype: torch.dtype) -> None:
    layer = replace(spec(2, 1, 32), scale=scale)
    text = make_text(layer, 70, dtype=dtype)
    small = Chunk(Text(text.q / 4, text.k / 4, text.v), 0, 70)
    expect_exact(attend(attention, layer, [small], 16)[0], layer, small)


def test_a_batch_may_be_empty(attention: NativeAttention) -> None:
    assert attend(attention, spec(2, 1, 16), [], 16) == []
    nothing = Chunk(make_text(spec(2, 1, 16), 9), 9, 9)
    assert attend(attention, spec(2, 1, 16), [nothing, nothing], 16)[0].shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_is_not_lost_and_stays_in_its_sequence(attention: NativeAttention, dtype: torch.dtype) -> None:
    layer = spec(4, 2, 64)
    sick, sound = make_text(layer, 600, dtype=dtype), make_text(layer, 600, 1, dtype)
    sick.k[40, 1, 3] = NAN
    chunks = [Chunk(text, 599, 600) for text in (sound, sick, sound)]
    first, second, third = attend(attention, layer, chunks, 16)
    assert bool(torch.isnan(second[:, 2:]).all())
    assert bool(torch.isfinite(second[:, :2]).all())
    assert torch.equal(first, third)
    expect_exact(first, layer, chunks[0])


def test_stores_may_be_views(attention: NativeAttention) -> None:
    layer = spec(4, 2, 64)
    text = make_text(layer, 100)
    memory = torch.full((100, 3, 2, 64), NAN)
    memory[:, :2] = torch.stack((text.k, text.v), dim=2)
    segment = Segment(sequence_id=0, query_start=0, num_query=5, num_context=95, block_table=(0,))
    table = attention.plan([segment], 100)
    keys, values = memory[:, :2, 0], memory[:, :2, 1]
    expect_exact(attention.attend(layer, text.q[95:], table, keys, values), layer, Chunk(text, 95, 100))
    keys[95:], values[95:] = NAN, NAN
    new = NewKeys(text.k[95:], text.v[95:], torch.arange(95, 100))
    expect_exact(attention.attend(layer, text.q[95:], table, keys, values, new), layer, Chunk(text, 95, 100))
    assert torch.isnan(memory[:, 2]).all()


def test_refuses_what_it_cannot_compute(attention: NativeAttention) -> None:
    assert attention.can_run(torch.float32, 80) is None
    assert attention.can_run(torch.bfloat16, 256) is None
    assert "float16" in str(attention.can_run(torch.float16, 64))
    assert "4096" in str(attention.can_run(torch.float32, 4096))


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("seed", range(6))
def test_float32_bits_depend_on_what_a_row_sees_alone(native_tools: Tools, level: str, seed: int) -> None:
    """Not on threads, block size, batch mates, the chunk, or multiples of 64 tokens that no row sees any more."""
    draw = random.Random(seed)
    kv_heads, group, head_dim = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 8]), draw.choice([16, 20, 64, 80])
    window = [None, 64, 100, 600, None, 5][seed]
    layer = spec(kv_heads * group, kv_heads, head_dim, window, draw.choice([None, 5.0]))
    text, other = make_text(layer, 700), make_text(layer, 900, 1)
    alone, shared, crowd = (NativeAttention(native_tools(level, threads)) for threads in (1, 2, 5))
    whole = attend(alone, layer, [Chunk(text, 0, 700)], 16)[0]
    for block_size in (1, 5, 256):
        assert torch.equal(attend(crowd, layer, [Chunk(text, 0, 700)], block_size)[0], whole)
    for start, size in ((699, 1), (64, 1), (0, 1), (130, 7), (500, 65), *((draw.randrange(690), 1) for _ in range(4))):
        stop = start + size
        mate = draw.randrange(800)
        batch = [Chunk(other, mate, mate + draw.choice([1, 40])), Chunk(text, start, stop), Chunk(other, 0, 3)]
        for attention in (alone, shared):
            assert torch.equal(attend(attention, layer, batch, 16, seed=start)[1], whole[start:stop])
        assert torch.equal(attend(shared, layer, [Chunk(text, start, stop)], 16)[0], whole[start:stop])
        if window is not None and start >= window + 63:
            dropped = (start - window + 1) // 64 * 64
            assert torch.equal(attend(shared, layer, [Chunk(text, start, stop, dropped)], 32)[0], whole[start:stop])
