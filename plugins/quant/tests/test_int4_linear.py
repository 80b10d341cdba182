"""int4: error bound in closed form, arithmetic against float64, both paths, memory, bits, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.kernel.errors import CheckpointError
from pluglm_quant.int4 import Int4Config, Int4Linear, Int4Quantizer
from pluglm_quant.int4_packing import KernelCodes, PlainCodes

needs_kernel = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch's fast int4 layouts need AVX2"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantizer(dtype: torch.dtype, group_size: int = 64) -> Int4Quantizer:
    return Int4Quantizer(Int4Config(group_size=group_size), "cpu", dtype)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scales(linear: Int4Linear, num_inputs: int, group_size: int) -> torch.Tensor:
    """scale_NK float64, one per weight."""
    return linear.scale_zero_GN2[..., 0].T.double().repeat_interleave(group_size, 1)[:, :num_inputs]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 70), st.sampled_from([2, 8, 64]), st.sampled_from(DTYPES),
    st.sampled_from([1e-9, 1e-3, 1.0, 300.0]), st.sampled_from([0.0, 5.0, -5.0]),
)  # fmt: skip
def test_rounding_error_is_at_most_half_a_scale(
    n: int, k: int, group_size: int, dtype: torch.dtype, size: float, shift: float
) -> None:
    weight_NK = (random(n, k, seed=n * k) + shift) * size
    made = quantizer(dtype, group_size)
    linear = made.make_linear("w", weight_NK.clone(), None)
    error_NK = (weight_NK.double() - made.dequantize(linear).double()).abs()
    assert bool((error_NK <= scales(linear, k, group_size) * 0.5 * (1 + 1e-4)).all())


def test_scale_is_a_fifteenth_of_the_range_with_zero() -> None:
    # Groups of four: -1..2 -> 3 / 15; 1..3 -> 0..3 -> 3 / 15; -4..-1 -> -4..0 -> 4 / 15; the last one padded with 0.
    weight_NK = torch.tensor([[-1.0, 0.5, 2.0, 0.0, 1.0, 2.0, 3.0, 1.5, -4.0, -1.0]])
    linear = quantizer(torch.float32, 4).make_linear("w", weight_NK, None)
    torch.testing.assert_close(linear.scale_zero_GN2[:, 0, 0], torch.tensor([3.0, 3.0, 4.0]) / 15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (50, 130), (16, 64), (80, 576), (48, 96), (2064, 64), (1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 65])
def test_product_equals_float64(dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    made = quantizer(dtype)
    bias_N = random(n, seed=3)
    linear = made.make_linear("w", random(n, k, seed=1), bias_N.clone())
    x_RK = random(rows, k, seed=2).to(dtype)
    out_RN = linear(x_RK)
    assert out_RN.dtype == dtype
    weight_NK = made.dequantize(linear).double()
    expected_RN = x_RK.double() @ weight_NK.T + bias_N.to(dtype).double()
    # The kernel rounds (q - 8) * scale and the sum with zero; both stay under twice the group's range, 15 scales.
    size_NK = weight_NK.abs() + 15 * scales(linear, k, 64)
    bound_RN = (x_RK.double().abs() @ size_NK.T + bias_N.double().abs()) * 4 * torch.finfo(dtype).eps
    assert bool(((out_RN.double() - expected_RN).abs() <= bound_RN).all())


@needs_kernel
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("n", [16, 32, 64, 80, 96, 144, 1104])
def test_kernel_and_tiles_agree(n: int, group_size: int) -> None:
    linear = quantizer(torch.bfloat16, group_size).make_linear("w", random(n, 384, seed=1), None)
    assert isinstance(linear.codes, KernelCodes)
    x_RK = random(6, 384, seed=2).bfloat16()
    largest = float(linear.by_tiles(x_RK).abs().max())
    difference_RN = (linear.by_kernel(x_RK, linear.codes).float() - linear.by_tiles(x_RK).float()).abs()
    # Two roundings to 8 bits a weight on the kernel's side; 384 terms average them out far below this.
    assert float(difference_RN.max()) <= 4 * 2**-7 * largest


@needs_kernel
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 9))
def test_codes_survive_both_layouts(sixteenths: int, pairs: int, seed: int) -> None:
    codes_NK = torch.randint(
        0, 16, (16 * sixteenths, 2 * pairs), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    plain, kernel = PlainCodes.pack(codes_NK), KernelCodes.pack(codes_NK)
    assert torch.equal(plain.unpack(0, codes_NK.shape[0]), codes_NK.float())
    assert kernel is not None
    assert torch.equal(kernel.unpack(0, codes_NK.shape[0]), codes_NK.float())
    assert plain.packed_NJ.nbytes == kernel.packed.nbytes == codes_NK.numel() // 2


def test_an_unknown_kernel_order_is_refused_not_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shuffled:
        class aten:  # noqa: N801
            @staticmethod
            def _convert_weight_to_int4pack_for_cpu(codes: torch.Tensor, tiles: int) -> torch.Tensor:
                return PlainCodes.pack(codes.to(torch.uint8)).packed_NJ.roll(1, 0)

    monkeypatch.setattr(torch, "ops", Shuffled)
    linear = quantizer(torch.bfloat16).make_linear("w", random(64, 64), None)
    assert isinstance(linear.codes, PlainCodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 16, 64, 80])
def test_bits_of_a_row_do_not_depend_on_its_place_or_neighbours(dtype: torch.dtype, rows: int) -> None:
    linear = quantizer(dtype).make_linear("w", random(96, 576, seed=1), random(96, seed=4))
    x_RK = random(rows, 576, seed=2).to(dtype)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x_RK[order]), linear(x_RK)[order])
    others_RK = random(rows, 576, seed=8).to(dtype)
    others_RK[rows // 2] = x_RK[0]
    assert torch.equal(linear(others_RK)[rows // 2], linear(x_RK)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_half_a_byte_a_weight_and_nothing_full_precision_is_held(dtype: torch.dtype) -> None:
    linear = quantizer(dtype).make_linear("w", random(64, 128), random(64))
    size = dtype.itemsize
    assert linear.num_bytes == 64 * 128 // 2 + 64 * 2 * 2 * size + 64 * size
    held = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    held.append(linear.codes.packed if isinstance(linear.codes, KernelCodes) else linear.codes.packed_NJ)
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == linear.num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_groups_stay_zero(dtype: torch.dtype) -> None:
    weight_NK = random(16, 128)
    weight_NK[2:4] = 0
    weight_NK[5, 64:] = 0
    made = quantizer(dtype)
    linear = made.make_linear("w", weight_NK.clone(), None)
    assert bool((made.dequantize(linear)[2:4] == 0).all())
    assert bool((made.dequantize(linear)[5, 64:] == 0).all())
    assert bool((linear(random(3, 128).to(dtype))[:, 2:4] == 0).all())


def test_wrong_configs_and_weights_are_refused() -> None:
    for wrong in (0, 7, -64):
        with pytest.raises(ValidationError, match="group_size"):
            Int4Config(group_size=wrong)
    weight_NK = random(4, 8)
    weight_NK[1, 3] = float("nan")
    with pytest.raises(CheckpointError, match="down_proj"):
        quantizer(torch.float32).make_linear("down_proj", weight_NK, None)
    with pytest.raises(TypeError, match="did not make this layer"):
        quantizer(torch.float32).dequantize(object())  # type: ignore[arg-type]
