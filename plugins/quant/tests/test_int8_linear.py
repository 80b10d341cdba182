"""int8: error bound in closed form, arithmetic against float64, both paths, memory, bits, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm_quant.int8 import Int8Linear, Int8Quantizer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantizer(dtype: torch.dtype) -> Int8Quantizer:
    return Int8Quantizer(ComponentConfig(), "cpu", dtype)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(DTYPES), st.sampled_from([1e-9, 1e-3, 1.0, 300.0]))
def test_rounding_error_is_at_most_half_a_scale(n: int, k: int, dtype: torch.dtype, size: float) -> None:
    weight_NK = random(n, k, seed=n * k) * size
    made = quantizer(dtype)
    linear = made.make_linear("w", weight_NK.clone(), None)
    error_NK = (weight_NK.double() - made.dequantize(linear).double()).abs()
    assert bool((error_NK <= linear.scale_N.double()[:, None] * 0.5 * (1 + 1e-5)).all())
    ideal_N = weight_NK.double().abs().amax(1) / 127
    assert bool((linear.scale_N.double() <= ideal_N.clamp(min=torch.finfo(dtype).tiny) * (1 + 2**-8)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (8, 20), (50, 130), (16, 72), (64, 576), (2050, 32), (1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 5, 24, 33])
def test_product_equals_float64(dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    made = quantizer(dtype)
    bias_N = random(n, seed=3)
    linear = made.make_linear("w", random(n, k, seed=1), bias_N.clone())
    x_RK = random(rows, k, seed=2).to(dtype)
    out_RN = linear(x_RK)
    assert out_RN.dtype == dtype
    weight_NK = made.dequantize(linear).double()
    expected_RN = x_RK.double() @ weight_NK.T + bias_N.to(dtype).double()
    # Each term is rounded once as a weight and once as a product, the sum twice more, all relative to sum |x w|.
    bound_RN = (x_RK.double().abs() @ weight_NK.abs().T + bias_N.double().abs()) * 4 * torch.finfo(dtype).eps
    assert bool(((out_RN.double() - expected_RN).abs() <= bound_RN).all())


@pytest.mark.parametrize("k", [32, 96, 576])
def test_kernel_and_tiles_agree(k: int) -> None:
    linear = quantizer(torch.bfloat16).make_linear("w", random(48, k, seed=1), None)
    assert linear.has_kernel
    x_RK = random(6, k, seed=2).bfloat16()
    # One ulp at the size of the largest output (8 bits of mantissa) for each of the two paths' last roundings.
    largest = float(linear.by_tiles(x_RK).abs().max())
    difference_RN = (linear.by_kernel(x_RK).float() - linear.by_tiles(x_RK).float()).abs()
    assert float(difference_RN.max()) <= 2 * 2**-7 * largest


def test_kernel_is_kept_from_shapes_it_cannot_read() -> None:
    for k in (20, 72, 130):
        assert not quantizer(torch.bfloat16).make_linear("w", random(8, k), None).has_kernel
    assert not quantizer(torch.float32).make_linear("w", random(8, 64), None).has_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 16, 32, 64])
def test_bits_of_a_row_do_not_depend_on_its_place_or_neighbours(dtype: torch.dtype, rows: int) -> None:
    linear = quantizer(dtype).make_linear("w", random(96, 576, seed=1), random(96, seed=4))
    x_RK = random(rows, 576, seed=2).to(dtype)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x_RK[order]), linear(x_RK)[order])
    others_RK = random(rows, 576, seed=8).to(dtype)
    others_RK[rows // 2] = x_RK[0]
    assert torch.equal(linear(others_RK)[rows // 2], linear(x_RK)[0])


def test_memory_is_one_byte_a_weight_and_nothing_full_precision_is_held() -> None:
    linear = quantizer(torch.bfloat16).make_linear("w", random(64, 128), random(64))
    assert linear.num_bytes == 64 * 128 + 64 * 2 + 64 * 2
    held = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == linear.num_bytes


def test_zero_channels_stay_zero() -> None:
    weight_NK = random(6, 32)
    weight_NK[2:4] = 0
    for dtype in DTYPES:
        made = quantizer(dtype)
        linear = made.make_linear("w", weight_NK.clone(), None)
        assert bool((made.dequantize(linear)[2:4] == 0).all())
        assert bool((linear(random(3, 32).to(dtype))[:, 2:4] == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weights_are_refused_by_name(bad: float) -> None:
    weight_NK = random(4, 8)
    weight_NK[1, 3] = bad
    with pytest.raises(CheckpointError, match=r"layers\.0\.q_proj\.weight"):
        quantizer(torch.float32).make_linear("layers.0.q_proj.weight", weight_NK, None)
    for wrong in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(0, 4)):
        with pytest.raises(CheckpointError, match="w: cannot quantise"):
            quantizer(torch.float32).make_linear("w", wrong, None)


def test_foreign_layers_are_refused() -> None:
    class Other:
        num_bytes = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(TypeError, match="did not make this layer: Other"):
        quantizer(torch.float32).dequantize(Other())
    assert isinstance(quantizer(torch.float32).make_linear("w", random(2, 2), None), Int8Linear)
