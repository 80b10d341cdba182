"""Fused layers and heads in triton's interpreter against the family's own functions on torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs
from triton_families import FAMILIES, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Family

from pluglm.arguments import silent
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog
from pluglm.kernel.interfaces.model import ModelContext
from pluglm.triton_kernels.fuser import TritonFuser

# T: rows, D: hidden size, N: query heads, K: kv heads, H: head dim

# Of values up to about 16. float32: sums of tens of products. float16: five roundings on the way, by 2**-11 each.
BOUND = {torch.float32: 5e-5, torch.float16: 0.03}
ROWS = (0, 1, 5)


def load(
    family: Family, dtype: torch.dtype, held: torch.dtype, fuser: Any = None, make_linear: Any = DenseLinear
) -> Any:
    context = ModelContext(
        device="cpu", dtype=dtype, make_linear=make_linear, map_rows=whole_rows, progress=silent, fuser=fuser
    )
    return family.model.load(family.checkpoint(held), context)


def random(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def angles(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of unlike positions; the first half of the sine is negated."""
    angles_T1F = torch.arange(num_rows)[:, None, None] * 7.0 * 0.3 ** torch.arange(HEAD_DIM // 2)
    cos_T1H, sin_T1H = torch.cat([angles_T1F.cos()] * 2, -1), torch.cat((-angles_T1F.sin(), angles_T1F.sin()), -1)
    return cos_T1H.to(dtype), sin_T1H.to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=BOUND[dtype])


def test_kernels_are_interpreted() -> None:
    assert knobs.runtime.interpret


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_equal_float64(name: str, dtype: torch.dtype) -> None:
    log = KernelLog()
    ours = load(FAMILIES[name], dtype, dtype, TritonFuser("cpu", log))
    exact = load(FAMILIES[name], torch.float64, dtype)
    assert log.choices == [KernelChoice("decoder layer", "triton"), KernelChoice("head", "triton")]
    for num_rows in ROWS:
        x_TD, out_TNH = random(dtype, num_rows, HIDDEN, scale=3.0), random(dtype, num_rows, HEADS, HEAD_DIM)
        cosine, sine = angles(num_rows, dtype)
        heads = ours._layers[1].before_attention(never, x_TD, cosine, sine)
        assert [one.shape[1] for one in heads] == [HEADS, KV_HEADS, KV_HEADS]
        wide = exact._layers[1].pre_attention(x_TD.double(), cosine.double(), sine.double())
        for found, expected in zip(heads, wide, strict=True):
            close(found, expected, dtype)
        rest = ours._layers[1].after_attention(never, x_TD, out_TNH)
        close(rest, exact._layers[1].post_attention(x_TD.double(), out_TNH.double())[0], dtype)


def never(*arguments: Any) -> Any:
    """A RowMap of which a fused layer has no need."""
    raise AssertionError("the family's own functions ran")


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_heads_equal_float64(name: str, dtype: torch.dtype) -> None:
    """Tied, untied, and tied with a soft cap, which is the family's."""
    ours = load(FAMILIES[name], dtype, dtype, TritonFuser("cpu", KernelLog()))
    exact = load(FAMILIES[name], torch.float64, dtype)
    for num_rows in ROWS:
        hidden_RD = random(dtype, num_rows, HIDDEN, scale=3.0)
        logits_RV = ours.logits(hidden_RD)
        assert logits_RV.dtype == torch.float32
        expected = exact.logits(hidden_RD.double())
        torch.testing.assert_close(logits_RV.double(), expected.double(), rtol=0, atol=BOUND[dtype])


class RoundedLinear:
    """Weights in 16 steps, as an int4 quantizer makes them; it offers nothing but the call."""

    num_bytes = 0

    def __init__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 7
        self._codes_NK, self._scale_N1 = (weight_NK / scale_N1).round().to(torch.int8), scale_N1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self._codes_NK.to(x.dtype) * self._scale_N1.to(x.dtype)).T


def test_linears_of_a_quantizer_are_fused_too() -> None:
    family, log = FAMILIES["llama"], KernelLog()
    ours = load(family, torch.float32, torch.float32, TritonFuser("cpu", log), RoundedLinear)
    plain = load(family, torch.float32, torch.float32, make_linear=RoundedLinear)
    assert KernelChoice("decoder layer", "triton") in log.choices
    x_TD, out_TNH = random(torch.float32, 3, HIDDEN), random(torch.float32, 3, HEADS, HEAD_DIM)
    found = ours._layers[0].after_attention(never, x_TD, out_TNH)
    (expected,) = plain._layers[0].post_attention(x_TD, out_TNH)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
