"""Fused native layers and heads against the same layer written down in float64, for few rows and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.model import FusedTiedHead, LayerParts, LayerSpec, Linear
from pluglm.native.fuser import NativeFuser
from pluglm.native.isa import LEVELS, missing
from pluglm.native.layers import ACTIVATIONS
from pluglm.native.tools import NativeTools

Tools = Callable[..., NativeTools]
RUNNABLE = [level.name for level in LEVELS if missing(level) is None]

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 6, 2, 24, 96, 160
EPS = 1e-5
# Of results of order 1. bfloat16 rounds five times on the way, by 2**-9 each, of values up to about 8.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 0.09}
PLAIN = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_parts(
    tools: NativeTools,
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    heads: bool,
    sandwich: bool,
    deterministic: bool = False,
    head_dim: int = HEAD_DIM,
) -> LayerParts:
    fuser = NativeFuser(tools, KernelLog(), deterministic=deterministic)

    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        weight = (random(outputs, inputs, seed=seed) * inputs**-0.5).to(dtype)
        return fuser.make_linear("w", weight, random(outputs, seed=seed + 1).to(dtype) if bias else None)

    def norm(seed: int, *shape: int) -> torch.Tensor:
        return 1.0 + 0.1 * random(*shape, seed=seed)

    all_heads = HEADS + 2 * KV_HEADS
    return LayerParts(
        spec=LayerSpec(index=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim, scale=1.0),
        activation=activation,
        eps=EPS,
        attention_norm=norm(1, WIDTH),
        mlp_norm=norm(2, WIDTH),
        qkv=linear(all_heads * head_dim, WIDTH, 10),
        output=linear(WIDTH, HEADS * head_dim, 20),
        gate_up=linear(2 * INNER, WIDTH, 30),
        down=linear(WIDTH, INNER, 40),
        head_norm=norm(3, HEADS + KV_HEADS, head_dim) if heads else None,
        attention_out_norm=norm(4, WIDTH) if sandwich else None,
        mlp_out_norm=norm(5, WIDTH) if sandwich else None,
    )


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias_N is None else layer.bias_N.double()
    return functional.linear(x, layer.weight.double(), bias)


def exact_heads(parts: LayerParts, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """[T, C, H]; sine has its first half negated, so rolling by half a head turns it."""
    head_dim = parts.spec.head_dim
    heads = exact_product(parts.qkv, exact_norm(x, parts.attention_norm)).view(len(x), -1, head_dim)
    turned = heads[:, : HEADS + KV_HEADS]
    if parts.head_norm is not None:
        turned = exact_norm(turned, parts.head_norm)
    turned = turned * cosine + turned.roll(head_dim // 2, -1) * sine
    return torch.cat((turned, heads[:, HEADS + KV_HEADS :]), 1)


def exact_rest(parts: LayerParts, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    change = exact_product(parts.output, attended.flatten(1))
    x = x + (change if parts.attention_out_norm is None else exact_norm(change, parts.attention_out_norm))
    gate, up = exact_product(parts.gate_up, exact_norm(x, parts.mlp_norm)).chunk(2, -1)
    change = exact_product(parts.down, PLAIN[parts.activation](gate) * up)
    return x + (change if parts.mlp_out_norm is None else exact_norm(change, parts.mlp_out_norm))


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "bias", "heads", "sandwich"),
    [
        ("silu", False, False, False),
        ("silu", True, True, False),
        ("gelu_pytorch_tanh", False, True, True),
        ("gelu", False, False, True),
        ("relu", True, False, False),
    ],
)
@pytest.mark.parametrize("head_dim", [24, 32])  # of 32, every product has a shape for panels
def test_equals_float64(
    native_tools: Tools,
    level: str,
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    heads: bool,
    sandwich: bool,
    head_dim: int,
) -> None:
    parts = make_parts(native_tools(level), dtype, activation, bias, heads, sandwich, head_dim=head_dim)
    fused = NativeFuser(native_tools(level), KernelLog(), deterministic=False).layer(parts)
    assert fused is not None
    for rows in (1, 2, 19, 48, 65, 79, 311):
        x = random(rows, WIDTH, seed=6).to(dtype)
        attended = random(rows, HEADS, head_dim, seed=7).to(dtype)
        angles = random(rows, 1, head_dim // 2, seed=8)
        cosine = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        sine = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        got = torch.cat(fused.pre_attention(x, cosine, sine), 1)
        assert got.dtype == dtype
        heads_TCH = exact_heads(parts, x.double(), cosine.double(), sine.double())
        torch.testing.assert_close(got.double(), heads_TCH, rtol=0, atol=BOUND[dtype])
        rest = fused.post_attention(x, attended)
        exact = exact_rest(parts, x.double(), attended.double())
        torch.testing.assert_close(rest.double(), exact, rtol=0, atol=BOUND[dtype])


@pytest.mark.parametrize("level", RUNNABLE)
def test_deterministic_bits_depend_on_the_row_alone(native_tools: Tools, level: str) -> None:
    parts = make_parts(native_tools(level), torch.float32, "silu", True, True, True, deterministic=True)
    fused = NativeFuser(native_tools(level), KernelLog(), deterministic=True).layer(parts)
    assert fused is not None
    x, attended = random(90, WIDTH, seed=6), random(90, HEADS, HEAD_DIM, seed=7)
    cosine, sine = random(90, 1, HEAD_DIM, seed=8), random(90, 1, HEAD_DIM, seed=9)
    before, after = torch.cat(fused.pre_attention(x, cosine, sine), 1), fused.post_attention(x, attended)
    for start, end in ((0, 1), (41, 42), (3, 20), (11, 90)):
        rows = slice(start, end)
        assert torch.equal(torch.cat(fused.pre_attention(x[rows], cosine[rows], sine[rows]), 1), before[rows])
        assert torch.equal(fused.post_attention(x[rows], attended[rows]), after[rows])


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 320])  # of 320, it has the shape for panels
def test_heads_tied_and_untied(native_tools: Tools, level: str, dtype: torch.dtype, vocabulary: int) -> None:
    fuser = NativeFuser(native_tools(level), KernelLog(), deterministic=False)
    embedding, norm = (random(vocabulary, WIDTH, seed=1) * WIDTH**-0.5).to(dtype), 1 + 0.1 * random(WIDTH, seed=2)
    taken = fuser.tied_head(norm, EPS, fuser.placed(embedding))
    tied, untied = (fuser.head(norm, EPS, one) for one in (embedding, fuser.make_linear("head", embedding, None)))
    assert tied is not None
    assert untied is not None
    for rows in (1, 5, 300):
        hidden = random(rows, WIDTH, seed=3).to(dtype)
        exact = exact_norm(hidden.double(), norm) @ embedding.double().T
        for head in (taken, tied, untied):
            logits = head(hidden)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits.double(), exact, rtol=0, atol=BOUND[dtype])


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 320])
def test_a_tied_head_knows_the_embedding_that_it_took_over(
    native_tools: Tools, level: str, dtype: torch.dtype, vocabulary: int
) -> None:
    fuser = NativeFuser(native_tools(level, 3), KernelLog(), deterministic=False)
    given = random(vocabulary, WIDTH, seed=1).to(dtype)
    placed = fuser.placed(given)
    assert not isinstance(fuser.head(torch.ones(WIDTH), EPS, placed), FusedTiedHead)
    assert torch.equal(placed, given)
    head = fuser.tied_head(torch.ones(WIDTH), EPS, placed)
    assert isinstance(head, FusedTiedHead)
    everyone = torch.arange(vocabulary)
    for token_ids in (everyone, everyone[:0], everyone[-1:], everyone.flip(0)[::7], torch.tensor([5, 5, 0])):
        assert torch.equal(head.embed(token_ids), given[token_ids])
    for wrong in (-1, vocabulary):
        with pytest.raises(IndexError):
            head.embed(torch.tensor([3, wrong]))


def test_what_cannot_be_fused_is_recorded_with_its_reason(native_tools: Tools) -> None:
    class Foreign:
        num_bytes = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    log = KernelLog()
    fuser = NativeFuser(native_tools("baseline"), log, deterministic=False)
    parts = make_parts(native_tools("baseline"), torch.float32, "silu", False, False, False)
    foreign = {**{name: getattr(parts, name) for name in parts.__dataclass_fields__}, "down": Foreign()}
    assert fuser.layer(LayerParts(**foreign)) is None
    assert fuser.layer(LayerParts(**{**foreign, "down": parts.down, "activation": "mish"})) is None
    assert fuser.head(parts.mlp_norm, EPS, Foreign()) is None
    assert [(one.kernel, one.refused[0][1]) for one in log.choices] == [
        ("torch", "its products are Foreign"),
        ("torch", "activation mish has no native form"),
        ("torch", "its product is Foreign"),
    ]


def test_every_activation_of_the_models_has_a_native_form() -> None:
    from pluglm.models.activations import ACTIVATIONS as KNOWN

    assert set(ACTIVATIONS) == set(KNOWN)
