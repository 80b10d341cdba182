"""Products in panels against float64, and what becomes of their sums. For levels that multiply pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog
from pluglm.kernel.interfaces.model import LayerParts, LayerSpec
from pluglm.native.fuser import NativeFuser
from pluglm.native.isa import LEVELS, missing
from pluglm.native.linear import ANY_ROWS, NativeLinear
from pluglm.native.tools import NativeTools

Tools = Callable[..., NativeTools]
LEVELS_WITH_PAIRS = [one.name for one in LEVELS if one.name in ("amx", "avx512_bf16") and missing(one) is None]

on_pairs = pytest.mark.parametrize("level", LEVELS_WITH_PAIRS)  # skipped where there are none

# As in test_native_linear: of the sum of the products' magnitudes, and of the result, which is rounded to bfloat16.
FLOAT32, BFLOAT16 = 2**-21, 2**-8
# every size of a block of registers and of tiles, and blocks of unequal sizes
ROWS = (*range(1, 14), 16, 17, 23, 31, 32, 33, 47, 48, 49, 61, 96, 203)
SHAPES = [(32, 32), (32, 1600), (96, 64), (320, 96), (64, 1600), (2080, 32)]
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@on_pairs
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_equals_float64(
    native_tools: Tools, level: str, outputs: int, inputs: int, has_bias: bool, num_threads: int
) -> None:
    weight = random(outputs, inputs, seed=0).bfloat16()
    bias = random(outputs, seed=1).bfloat16() if has_bias else None
    layer = NativeLinear(native_tools(level, num_threads), weight, bias)
    assert layer.is_packed
    assert layer.most_rows == ANY_ROWS
    for rows in ROWS:
        x = random(rows, inputs, seed=2).bfloat16()
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
        assert bool(((layer.native(x, torch.float32).double() - exact).abs() <= FLOAT32 * size).all())
        assert bool(((layer(x).double() - exact).abs() <= FLOAT32 * size + BFLOAT16 * exact.abs()).all())


@on_pairs
@pytest.mark.parametrize("num_threads", [1, 3])
def test_weights_are_packed_where_they_lie_unless_others_read_them(
    native_tools: Tools, level: str, num_threads: int
) -> None:
    tools, given = native_tools(level, num_threads), random(96, 64, seed=0).bfloat16()
    weight = tools.placed(given)
    shared = NativeLinear(tools, weight, None, shared=True)
    assert torch.equal(weight, given)
    assert shared.weight.data_ptr() == weight.data_ptr()
    assert shared.why_torch == "others read it as it lies"
    packed = NativeLinear(tools, weight, None)
    assert not torch.equal(weight, given)
    assert torch.equal(packed.weight, given)
    # sixteen outputs after sixteen, and of each of those the pair of inputs that the others have there too
    assert weight.view(6, 32, 16, 2)[4, 31, 7].tolist() == given[4 * 16 + 7, 62:].tolist()


@on_pairs
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (64, 48), (17, 5)])
def test_other_shapes_stay_as_they_lie(native_tools: Tools, level: str, outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, seed=0).bfloat16()
    layer = NativeLinear(native_tools(level), weight, None)
    assert not layer.is_packed
    assert torch.equal(layer.weight, weight)


@on_pairs
def test_bits_of_a_row_do_not_depend_on_the_others(native_tools: Tools, level: str) -> None:
    x = random(150, 64, seed=1).bfloat16()
    wholes = []
    for num_threads in (1, 3):
        layer = NativeLinear(native_tools(level, num_threads), random(96, 64, seed=0).bfloat16(), None)
        wholes.append(whole := layer(x))
        for start, end in ((0, 1), (149, 150), (3, 8), (20, 33), (0, 48), (1, 50), (77, 150)):
            assert torch.equal(layer(x[start:end]), whole[start:end])
    assert torch.equal(*wholes)


@on_pairs
def test_bits_of_a_row_of_a_layer_do_not_depend_on_the_others(native_tools: Tools, level: str) -> None:
    tools, width = native_tools(level, 2), 64
    fused = NativeFuser(tools, KernelLog(), deterministic=False).layer(
        make_feed_forward(tools, width, 160, "silu", has_bias=False)
    )
    assert fused is not None
    x, attended = random(130, width, seed=1).bfloat16(), random(130, width // 32, 32, seed=2).bfloat16()
    angles = random(2, 130, 1, 32, seed=3).bfloat16()
    before, after = torch.cat(fused.pre_attention(x, *angles), 1), fused.post_attention(x, attended)
    for start, end in ((0, 1), (5, 10), (40, 90), (0, 130)):
        rows = slice(start, end)
        assert torch.equal(torch.cat(fused.pre_attention(x[rows], *angles[:, rows]), 1), before[rows])
        assert torch.equal(fused.post_attention(x[rows], attended[rows]), after[rows])


@on_pairs
def test_nothing_hides_nan_and_infinity(native_tools: Tools, level: str) -> None:
    x = random(60, 64, seed=0).bfloat16()
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    layer = NativeLinear(native_tools(level), torch.ones(32, 64).bfloat16(), None)
    for rows in (4, 60):
        result = layer(x[:rows])
        assert bool(result[1].isnan().all())
        assert bool(result[2].isinf().all())
        assert bool(result[[0, *range(3, rows)]].isfinite().all())


def make_feed_forward(tools: NativeTools, width: int, inner: int, activation: str, has_bias: bool) -> LayerParts:
    """A layer whose output projection is the identity; its last product takes the first `width` of the gated values."""

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        return NativeLinear(tools, weight.bfloat16(), None if bias is None else bias.bfloat16())

    gate_up = random(2 * inner, width, seed=1) * width**-0.5 * 3
    return LayerParts(
        spec=LayerSpec(index=0, num_heads=width // 32, num_kv_heads=1, head_dim=32, scale=1.0),
        activation=activation,
        eps=0.0,
        attention_norm=torch.ones(width),
        mlp_norm=torch.ones(width),
        qkv=linear(torch.zeros(width + 64, width)),
        output=linear(torch.eye(width)),
        gate_up=linear(gate_up, random(2 * inner, seed=2) if has_bias else None),
        down=linear(torch.eye(width, inner)),
    )


@on_pairs
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_gated_products_equal_float64(
    native_tools: Tools, level: str, activation: str, has_bias: bool, num_threads: int
) -> None:
    """Rows of 1 and -1, whose norm leaves them as they are, so that only the gated product and the last sum round."""
    width, inner, tools = 64, 160, native_tools(level, num_threads)
    parts = make_feed_forward(tools, width, inner, activation, has_bias)
    fused = NativeFuser(tools, KernelLog(), deterministic=False).layer(parts)
    assert fused is not None
    weight = parts.gate_up.weight.double()  # type: ignore[attr-defined]
    bias = random(2 * inner, seed=2).bfloat16().double() if has_bias else 0
    for rows in (1, 5, 12, 48, 61, 250):
        x = random(rows, width, seed=rows).sign().bfloat16()
        got = fused.post_attention(torch.zeros_like(x), x.view(rows, width // 32, 32))
        gate, up = (x.double() @ weight.T + bias).chunk(2, -1)
        active = (ACTIVATIONS[activation](gate) * up)[:, :width]
        bound = 2**-8 * (active.abs() + (x.double() + active).abs()) + 1e-5
        assert bool(((got.double() - (x.double() + active)).abs() <= bound).all())


@on_pairs
def test_silu_of_extremes(native_tools: Tools, level: str) -> None:
    """Small gates keep their relative precision; large ones stay what they are, or vanish."""
    tools, width = native_tools(level), 32
    parts = make_feed_forward(tools, width, 32, "silu", has_bias=True)
    gates = torch.tensor([0.0, 1e-30, -1e-30, 1e-4, -1e-4, 1, -1, 9, -9, 80, -80, 120, -120, 1e4, -1e4, 3e38, -3e38])
    for gate in gates.bfloat16():
        bias = torch.cat((torch.full((32,), float(gate)), torch.ones(32)))
        zero = torch.zeros(64, width, dtype=torch.bfloat16)
        changed = {name: getattr(parts, name) for name in parts.__dataclass_fields__}
        changed |= {"gate_up": NativeLinear(tools, zero, bias.bfloat16()), "eps": 1.0}
        fused = NativeFuser(tools, KernelLog(), deterministic=False).layer(LayerParts(**changed))
        assert fused is not None
        x = torch.zeros(5, width, dtype=torch.bfloat16)
        got = fused.post_attention(x, x.view(5, 1, 32))
        exact = functional.silu(gate.double()).float()
        torch.testing.assert_close(got.float(), exact.expand(5, width), rtol=2**-8, atol=1e-34)


def test_what_is_recorded_about_many_rows(native_tools: Tools) -> None:
    def choices(level: str, weight: torch.Tensor, deterministic: bool = False) -> list[KernelChoice]:
        log = KernelLog()
        NativeFuser(native_tools(level), log, deterministic=deterministic).make_linear("w", weight, None)
        return [one for one in log.choices if one.operation == "linear, many rows"]

    wide, narrow = torch.ones(64, 32), torch.ones(64, 48)
    reason = (("native (baseline)", "float32 of more than 8 rows is faster there"),)
    assert choices("baseline", wide) == [KernelChoice("linear, many rows", "torch", reason)]
    assert choices("baseline", wide, deterministic=True) == [KernelChoice("linear, many rows", "native (baseline)")]
    for level in LEVELS_WITH_PAIRS:
        assert choices(level, wide.bfloat16()) == [KernelChoice("linear, many rows", f"native ({level})")]
        reason = ((f"native ({level})", "[64, 48] is not in multiples of 32"),)
        assert choices(level, narrow.bfloat16()) == [KernelChoice("linear, many rows", "torch", reason)]
