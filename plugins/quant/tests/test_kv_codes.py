"""KV formats against closed forms in float64: how far numbers are off, what a row takes, and which codes there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.kv_format import token_bytes
from pluglm.testing.context import small_spec
from pluglm_quant.kv_fp8 import Fp8KV
from pluglm_quant.kv_int8 import Int8KV

FORMATS = [Int8KV, Fp8KV]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3 = torch.float8_e4m3fn
# float32: the quotient and the product are rounded once each, up to 127 and 448 scales.
ROUNDING = 448 * 2**-23


def made(cls: type[Any]) -> Any:
    return cls(ComponentConfig(), "cpu", torch.float32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def errors(cls: type[Any], x_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(|error|_TKH, scale_TK1) in float64."""
    codes, scales = made(cls).encode(x_TKH)
    return (made(cls).decode(codes, scales).double() - x_TKH.double()).abs(), scales.double()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from(DTYPES), st.sampled_from([1e-4, 1e-2, 1.0, 900.0]))
def test_int8_is_off_by_half_a_scale_at_most(heads: int, head_dim: int, dtype: torch.dtype, size: float) -> None:
    x_TKH = (random(3, heads, head_dim, seed=heads * head_dim) * size).to(dtype)
    error_TKH, scale_TK1 = errors(Int8KV, x_TKH)
    ideal_TK1 = (x_TKH.double().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    assert bool((error_TKH <= scale_TK1 * (0.5 + ROUNDING)).all())
    assert bool(((scale_TK1 - ideal_TK1).abs() <= ideal_TK1 * 2**-23).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from(DTYPES), st.sampled_from([1e-4, 1e-2, 1.0, 900.0]))
def test_fp8_keeps_four_bits_of_each_number(heads: int, head_dim: int, dtype: torch.dtype, size: float) -> None:
    x_TKH = (random(3, heads, head_dim, seed=heads + head_dim) * size).to(dtype)
    error_TKH, scale_TK1 = errors(Fp8KV, x_TKH)
    allowed_TKH = torch.maximum(x_TKH.double().abs() / 16, scale_TK1 * 2**-10)
    assert bool((error_TKH <= allowed_TKH + scale_TK1 * ROUNDING).all())


def test_every_number_of_e4m3_comes_back() -> None:
    """Of all 256 codes as torch reads them: with the largest in the row its scale is 1, so each is met exactly."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    row = numbers[numbers.isfinite()]
    assert len(row) == 254
    codes, scales = made(Fp8KV).encode(row.view(1, 1, -1))
    assert float(scales) == 1.0
    assert torch.equal(made(Fp8KV).decode(codes, scales).flatten(), row)
    assert 0x80 not in codes


def test_every_code_of_int8_comes_back() -> None:
    row = torch.arange(-127, 128).float()
    codes, scales = made(Int8KV).encode(row.view(1, 1, -1))
    assert float(scales) == 1.0
    assert codes.flatten().tolist() == row.int().tolist()


@pytest.mark.parametrize("cls", FORMATS)
def test_zeros_are_stored_as_zeros(cls: type[Any]) -> None:
    codes, scales = made(cls).encode(torch.zeros(2, 1, 8))
    assert not codes.any()
    assert bool((scales == torch.tensor(1e-12)).all())
    codes, _ = made(cls).encode(torch.tensor([[[-0.0, -1e-9, 1.0, 0.0]]]))  # e4m3 has a zero with a sign
    assert codes.flatten()[[0, 1, 3]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("cls", FORMATS)
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_spoilt_row_is_nan_throughout(cls: type[Any], spoilt: float, dtype: torch.dtype) -> None:
    x_TKH = random(2, 2, 16).to(dtype)
    x_TKH[0, 1, 3] = spoilt
    codes, scales = made(cls).encode(x_TKH)
    assert scales.isnan().flatten().tolist() == [False, True, False, False]
    found = made(cls).decode(codes, scales)
    assert bool(found[0, 1].isnan().all())
    assert int(found.isnan().sum()) == 16


@pytest.mark.parametrize("cls", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 3.4e38), (torch.bfloat16, 3.3e38), (torch.float16, 65504)]
)
def test_the_largest_numbers_are_not_clipped(cls: type[Any], dtype: torch.dtype, largest: float) -> None:
    x_TKH = torch.tensor([[[largest, -largest, largest / 2, 0.0]]]).to(dtype)
    error_TKH, _ = errors(cls, x_TKH)
    assert bool((error_TKH <= x_TKH.double().abs() / 16).all())


def test_bytes_of_a_token() -> None:
    """Two layers of two kv heads of 8: a key and a value of 8 codes and 4 bytes of scale in each."""
    layers = small_spec().layers
    for cls in FORMATS:
        row = made(cls).row(8)
        assert (row.num_bytes, row.code_dtype.itemsize, row.scale_dtype) == (12, 1, torch.float32)
        assert [token_bytes(layer, 2, made(cls)) for layer in layers] == [2 * 2 * 12] * 2
    assert [token_bytes(layer, 2, None) for layer in layers] == [2 * 2 * 16] * 2
