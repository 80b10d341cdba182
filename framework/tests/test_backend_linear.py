"""The packed linear layer against the plain one and against float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional

from pluglm.backends.linear import DenseLinear, PackedLinear, can_pack

# Relative to the largest result: a float32 sum of up to 1536 products; bfloat16 rounds the result to 8 bits.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (33, 17), (1, 1), (5, 300)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_and_dense_agree_with_float64(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this build of torch on this CPU packs no {dtype} weights")
    width, num_out = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((num_out, width), generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    for num_rows in (0, 1, 8, 65):
        x = torch.randn((num_rows, width), generator=generator).to(dtype)
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if num_rows else 1.0)
        for kind in (DenseLinear, PackedLinear):
            result = kind("w", weight.clone(), bias)(x)
            assert result.dtype == dtype
            assert result.shape == (num_rows, num_out)
            torch.testing.assert_close(result.double(), expected, rtol=0, atol=limit)


def test_packed_reads_rows_that_are_not_contiguous() -> None:
    if not can_pack(torch.float32):
        pytest.skip("this build of torch packs no float32 weights")
    weight, wide = torch.randn(24, 32), torch.randn(6, 96)
    part = wide[:, 32:64]
    torch.testing.assert_close(
        PackedLinear("w", weight, None)(part), functional.linear(part, weight), rtol=0, atol=1e-4
    )


def test_packed_lets_the_plain_weight_go() -> None:
    if not can_pack(torch.float32):
        pytest.skip("this build of torch packs no float32 weights")
    weight = torch.randn(64, 32)
    alive = weakref.ref(weight)
    layer = PackedLinear("w", weight, None)
    del weight
    gc.collect()
    assert alive() is None
    assert layer.num_bytes == 64 * 32 * 4


def test_num_bytes_counts_the_bias() -> None:
    assert DenseLinear("w", torch.zeros(4, 3), torch.zeros(4)).num_bytes == 4 * (3 * 4 + 4)


def test_float16_is_not_packed() -> None:
    assert not can_pack(torch.float16)
