"""The framework's triton kernels in triton's interpreter, against closed forms in float64.

Run as a script this file is the other process: the interpreter has to be chosen before any kernel is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pluglm.models.rope import rotate
from pluglm.triton_kernels.availability import unavailable
from pluglm.triton_kernels.gated import gated
from pluglm.triton_kernels.gather import gather_rows
from pluglm.triton_kernels.rms_norm import add_rms_norm, add_rows, rms_norm
from pluglm.triton_kernels.rope import rope

# T: rows, D: features, C: heads, H: head dim, F: H / 2

DTYPES = {"float32": torch.float32, "float16": torch.float16}
EPS = 1e-5
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

Pair = tuple[torch.Tensor, torch.Tensor]


def _random(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def _norm_of(x_TD: torch.Tensor, weight_D: torch.Tensor, offset: float) -> torch.Tensor:
    """The definition, in float64."""
    x_TD = x_TD.double()
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + EPS).sqrt() * (offset + weight_D.double())


def norms(dtype: torch.dtype) -> list[Pair]:
    """Odd widths, one feature, a strided view, large values, zeros; Gemma's offset."""
    pairs = []
    for width, offset in ((576, 0.0), (100, 1.0), (1, 0.0), (64, 1.0)):
        x_TD, weight_D = _random(dtype, 3, width, scale=20.0), _random(dtype, width)
        pairs.append((rms_norm(x_TD, weight_D, EPS, offset), _norm_of(x_TD, weight_D, offset)))
    view_TD = _random(dtype, 3, 48)[:, 8:40]
    pairs.append((rms_norm(view_TD, _random(dtype, 32), EPS), _norm_of(view_TD, _random(dtype, 32), 0.0)))
    zeros_TD = torch.zeros(2, 16, dtype=dtype)
    pairs.append((rms_norm(zeros_TD, _random(dtype, 16), EPS), zeros_TD.double()))
    return pairs


def residual_norms(dtype: torch.dtype) -> list[Pair]:
    """Both results; the sum is rounded before it is normalised."""
    pairs = []
    for width, offset in ((576, 0.0), (33, 1.0)):
        x_TD, weight_D = _random(dtype, 2, width), _random(dtype, width)
        residual_TD = _random(dtype, 2, width + 1, scale=30.0)[:, 1:]
        out_TD, sum_TD = add_rms_norm(x_TD, residual_TD, weight_D, EPS, offset)
        exact_TD = x_TD.double() + residual_TD.double()
        pairs += [(sum_TD, exact_TD), (out_TD, _norm_of(exact_TD.to(dtype), weight_D, offset))]
    return pairs


def norms_on_both_sides(dtype: torch.dtype) -> list[Pair]:
    """What is added is normalised first and not rounded between; and sums that nothing is made of."""
    pairs = []
    for width, offset in ((96, 0.0), (33, 1.0)):
        x_TD, residual_TD = _random(dtype, 3, width, scale=20.0), _random(dtype, 3, width + 1)[:, 1:]
        inner_D, outer_D = _random(dtype, width), _random(dtype, width + 2)[1:-1]
        out_TD, sum_TD = add_rms_norm(x_TD, residual_TD, outer_D, EPS, offset, inner_D)
        exact_TD = _norm_of(x_TD, inner_D, offset) + residual_TD.double()
        # The rounded sum itself: where float32 and float64 round it to different sides, the norm follows the former.
        pairs += [(sum_TD, exact_TD), (out_TD, _norm_of(sum_TD, outer_D, offset))]
        pairs.append((add_rows(x_TD, residual_TD, EPS, offset, inner_D), exact_TD))
        pairs.append((add_rows(x_TD, residual_TD), x_TD.double() + residual_TD.double()))
    return pairs


def _angles(num_rows: int, head_dim: int, dtype: torch.dtype) -> Pair:
    """cos_T1H and sin_T1H as pluglm.models.rope stores them."""
    angles_TF = torch.arange(num_rows, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(head_dim // 2)
    cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
    cos_T1H, sin_T1H = torch.cat((cos_TF, cos_TF), -1)[:, None], torch.cat((-sin_TF, sin_TF), -1)[:, None]
    return cos_T1H.to(dtype), sin_T1H.to(dtype)


def rotations(dtype: torch.dtype) -> list[Pair]:
    """As multiplication of complex numbers, and as the model's own `rotate`; heads of a fused product are a view."""
    pairs = []
    for num_heads, head_dim in ((5, 64), (2, 80), (1, 6), (70, 128)):
        heads_TCH = _random(dtype, 2, num_heads + 2, head_dim)
        turned_TCH = heads_TCH[:, :num_heads]
        cos_T1H, sin_T1H = _angles(2, head_dim, dtype)
        out_TCH, half = rope(turned_TCH, cos_T1H, sin_T1H), head_dim // 2
        wide_TCH, cos_T1F, sin_T1F = turned_TCH.double(), cos_T1H.double()[..., half:], sin_T1H.double()[..., half:]
        turned = torch.complex(wide_TCH[..., :half], wide_TCH[..., half:]) * torch.complex(cos_T1F, sin_T1F)
        pairs.append((out_TCH, torch.cat((turned.real, turned.imag), -1)))
        pairs.append((out_TCH, rotate(wide_TCH, cos_T1H.double(), sin_T1H.double())))
    return pairs


def normed_rotations(dtype: torch.dtype) -> list[Pair]:
    """Heads whose norms have weights of their own, as rows of C heads with H features each; then `rotate`."""
    pairs = []
    for num_heads, head_dim in ((3, 64), (2, 6), (5, 24)):
        x_TCH = _random(dtype, 3, num_heads + 1, head_dim, scale=8.0)[:, :num_heads]
        weight_CH, (cos_T1H, sin_T1H) = _random(torch.float32, num_heads, head_dim), _angles(3, head_dim, dtype)
        normed_TCH = torch.stack([_norm_of(x_TCH[:, c], weight_CH[c], 0.0) for c in range(num_heads)], 1)
        exact_TCH = rotate(normed_TCH, cos_T1H.double(), sin_T1H.double())
        pairs.append((rope(x_TCH, cos_T1H, sin_T1H, weight_CH, EPS), exact_TCH))
    return pairs


_WIDTHS = (
    ("silu", 300),
    ("swish", 1),
    ("gelu_pytorch_tanh", 300),
    ("gelu_pytorch_tanh", 2100),
    ("gelu", 70),
    ("relu", 70),
)


def activations(dtype: torch.dtype) -> list[Pair]:
    """From the definitions in float64; values far out on both sides."""
    pairs = []
    for name, width in _WIDTHS:
        gate_up = _random(dtype, 2, 2 * width + 1, scale=4.0)[:, 1:]
        gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
        gate, up = gate_up.double().chunk(2, -1)
        if name == "gelu_pytorch_tanh":
            act = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        elif name == "gelu":
            act = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
        elif name == "relu":
            act = gate * (gate > 0)
        else:
            act = gate / (1 + torch.exp(-gate))
        pairs.append((gated(gate_up, name), act * up))
    return pairs


def gathers(dtype: torch.dtype) -> list[Pair]:
    """Out of order, twice, from a view, and none."""
    x_TD = _random(dtype, 6, 96)[:, :70]
    rows = [5, 0, 0, 3]
    expected = torch.stack([x_TD[row] for row in rows]).double()
    none = gather_rows(x_TD, torch.tensor([], dtype=torch.int64))
    return [(gather_rows(x_TD, torch.tensor(rows)), expected), (none, torch.empty(0, 70).double())]


CASES: dict[str, Callable[[torch.dtype], list[Pair]]] = {
    case.__name__: case
    for case in (norms, residual_norms, norms_on_both_sides, rotations, normed_rotations, activations, gathers)
}


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation in units of the result's rounding: of the value, but of no less than a part of the largest one.

    A difference of products loses bits in float32, which a float16 result hides.
    """
    if not expected.numel():
        return 0.0 if found.shape == expected.shape else float("inf")
    info = torch.finfo(found.dtype)
    part = 1000 if found.dtype == torch.float16 else 16
    size = expected.abs().clamp(min=max(float(expected.abs().max()) / part, info.tiny / info.eps))
    return float(((found.double() - expected).abs() / (size * info.eps / 2)).max())


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    errors = {
        f"{name} {dtype}": [
            error_of(*pair) if pair[0].dtype == DTYPES[dtype] else float("inf") for pair in case(DTYPES[dtype])
        ]
        for name, case in CASES.items()
        for dtype in DTYPES
    }
    wide = torch.zeros(2, 4, dtype=torch.bfloat16)
    refusal = _refusal(lambda: rms_norm(wide, wide[0], EPS))
    sys.stdout.write(json.dumps({"errors": errors, "refusal": refusal, "unavailable": unavailable()}))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# float16: one rounding of a float32 value. float32: the roundings of a few operations; those of x1 cos - x2 sin are
# together at most 2 max|x| + max|out|, max|out| is at least max|x| / sqrt(2), and error_of divides by max|out| / 16.
def bound_of(name: str, dtype: str) -> float:
    if dtype == "float16":
        return 1.01
    return 16 * (2 * 2**0.5 + 1) if name.endswith("rotations") else 8.0


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_their_definitions(interpreted: dict[str, Any], name: str, dtype: str) -> None:
    errors = interpreted["errors"][f"{name} {dtype}"]
    assert errors
    assert max(errors) <= bound_of(name, dtype), errors


@needs_triton
def test_the_interpreter_is_available_and_refuses_bfloat16(interpreted: dict[str, Any]) -> None:
    assert interpreted["unavailable"] is None
    assert "computes bfloat16 wrongly" in interpreted["refusal"]


def test_a_machine_without_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unavailable() == "triton is not installed"
    x_TD = torch.ones(2, 4)
    with pytest.raises(ValueError, match="cannot run here: triton is not installed"):
        rms_norm(x_TD, x_TD[0], EPS)


@needs_triton
def test_a_machine_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unavailable() == "torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unavailable() == "no CUDA device is visible"


X_TD, HEADS_TCH, ANGLES = torch.ones(2, 4), torch.ones(2, 3, 4), torch.ones(2, 1, 4)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (lambda: rms_norm(X_TD.int(), X_TD[0], EPS), "x_TD is torch.int32"),
    "columns": (lambda: rms_norm(X_TD.T, X_TD[:, 0], EPS), "side by side"),
    "weight": (lambda: rms_norm(X_TD, X_TD[0, :3], EPS), "length of weight_D is 3, not 4"),
    "features": (lambda: rms_norm(torch.ones(1, 16385), torch.ones(16385), EPS), "1 to 16384 fit"),
    "residual": (lambda: add_rms_norm(X_TD, X_TD[:1], X_TD[0], EPS), "shape of residual_TD"),
    "mixed": (lambda: add_rms_norm(X_TD, X_TD.half(), X_TD[0], EPS), "dtype of residual_TD is torch.float16"),
    "angles": (
        lambda: rope(HEADS_TCH, HEADS_TCH, HEADS_TCH),
        r"cos_T1H has shape \(2, 3, 4\) .* not contiguous of shape \(2, 1, 4\)",
    ),
    "weights": (lambda: rope(HEADS_TCH, ANGLES, ANGLES, X_TD), r"shape of weight_CH is \(2, 4\), not \(3, 4\)"),
    "inner": (lambda: add_rows(X_TD, X_TD, EPS, 0.0, X_TD[0, :3]), "length of x_weight_D is 3, not 4"),
    "activation": (lambda: gated(X_TD, "mish"), "'mish' has no kernel; there are"),
    "odd": (lambda: gated(X_TD[:, :3], "silu"), "width by 2 is 1, not 0"),
    "rows": (lambda: gather_rows(X_TD, torch.tensor([1], dtype=torch.int32)), "dtype of rows_R is torch.int32"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_no_kernel_takes_is_refused(name: str) -> None:
    call, reason = REFUSALS[name]
    with pytest.raises(ValueError, match=reason):
        call()


def test_nothing_imports_triton_until_a_kernel_runs() -> None:
    modules = ("availability", "aot", "rms_norm", "rope", "gated", "gather", "cases", "fuser", "layers")
    lines = [f"import pluglm.triton_kernels.{module}" for module in modules]
    code = "\n".join(["import sys, pluglm", *lines, "raise SystemExit('triton' in sys.modules)"])
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    main()
