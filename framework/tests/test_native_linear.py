"""The native product against float64, for every instruction level of this machine, and its bits in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pluglm.backends.linear import DenseLinear
from pluglm.native.isa import LEVELS, missing
from pluglm.native.linear import NativeLinear
from pluglm.native.tools import NativeTools

Tools = Callable[..., NativeTools]
RUNNABLE = [level.name for level in LEVELS if missing(level) is None]

# Relative to the sum of the magnitudes of the products, which bounds what float32 additions in any order can lose;
# the result is rounded once more to bfloat16.
FLOAT32, BFLOAT16 = 2**-21, 2**-8
SHAPES = [(960, 576), (48, 64), (33, 17), (1, 1), (16, 1600), (130, 96), (7, 31)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_float64(
    native_tools: Tools, level: str, dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool
) -> None:
    weight = random(outputs, inputs, dtype=dtype)
    bias = random(outputs, seed=1, dtype=dtype) if has_bias else None
    layer = NativeLinear(native_tools(level), weight, bias, always_native=True)
    for rows in (0, 1, 2, 3, 5, 16, 17, 32, 33, 70):
        x = random(rows, inputs, seed=2, dtype=dtype)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
        wide, narrow = layer.native(x, torch.float32), layer(x)
        assert narrow.dtype == dtype
        assert wide.shape == narrow.shape == (rows, outputs)
        assert bool(((wide.double() - exact).abs() <= FLOAT32 * size).all())
        limit = FLOAT32 * size + (exact.abs() * BFLOAT16 if dtype == torch.bfloat16 else 0)
        assert bool(((narrow.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 576), (37, 53)])
def test_float32_bits_depend_on_the_row_alone(native_tools: Tools, level: str, outputs: int, inputs: int) -> None:
    weight, x = random(outputs, inputs), random(64, inputs, seed=1)
    alone = torch.cat([NativeLinear(native_tools(level, 1), weight, None)(x[row : row + 1]) for row in range(64)])
    for num_threads in (1, 2, 5):
        layer = NativeLinear(native_tools(level, num_threads), weight, None, always_native=True)
        for start, end in ((0, 64), (0, 3), (5, 12), (20, 51)):
            assert torch.equal(layer(x[start:end]), alone[start:end])


@pytest.mark.parametrize("level", RUNNABLE)
def test_few_rows_and_many_agree(native_tools: Tools, level: str) -> None:
    """Past most_rows torch computes: the two meet the same bound."""
    weight, bias = random(96, 64), random(96, seed=1)
    layer, plain = NativeLinear(native_tools(level), weight, bias), DenseLinear("w", weight, bias)
    for rows in (1, layer.most_rows, layer.most_rows + 1, layer.most_rows + 40):
        x = random(rows, 64, seed=rows)
        torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("level", RUNNABLE)
def test_nothing_hides_nan_and_infinity(native_tools: Tools, level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random(3, 64, dtype=dtype)
        x[1, 5] = float("nan")
        x[2, 7] = float("inf")
        result = NativeLinear(native_tools(level), torch.ones(32, 64, dtype=dtype), None)(x)
        assert bool(result[0].isfinite().all())
        assert bool(result[1].isnan().all())
        assert bool(result[2].isinf().all())


def test_rows_that_are_not_contiguous_are_read_as_they_are(native_tools: Tools) -> None:
    weight, wide = random(24, 32), random(6, 96)
    layer = NativeLinear(native_tools("baseline"), weight, None)
    torch.testing.assert_close(layer(wide[:, 32:64]), wide[:, 32:64] @ weight.T, rtol=0, atol=1e-5)


def test_more_threads_than_cores_lose_no_chunk(native_tools: Tools) -> None:
    """A thousand small jobs on eight threads: a chunk left out, or done for another job, would be a wrong sum."""
    many = native_tools("baseline", 8)
    weights = [torch.full((640, 16), float(index)) for index in range(5)]
    layers = [NativeLinear(many, weight, None) for weight in weights]
    x = torch.ones(1, 16)
    for turn in range(1000):
        index = turn % 5
        assert torch.equal(layers[index](x), torch.full((1, 640), 16.0 * index))
