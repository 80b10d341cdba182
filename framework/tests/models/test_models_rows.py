"""Row-wise arithmetic: everything goes through map_rows, so tiles of one size make a row independent of its batch.

Authority: bit equality with the same row computed alone, and transformers' formulas for the norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pluglm.models.llama import LlamaModel
from pluglm.models.norms import head_norm, row_norm

TILE = 16
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


def map_tiles(function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The deterministic map in miniature: tiles of 16 rows, the last one padded with zeros."""
    num_rows = len(tensors[0])
    results = []
    for start in range(0, num_rows, TILE):
        tiles = [torch.zeros(TILE, *x.shape[1:], dtype=x.dtype) for x in tensors]
        for tile, x in zip(tiles, tensors, strict=True):
            tile[: len(x[start : start + TILE])] = x[start : start + TILE]
        results.append([y[: num_rows - start] for y in function(*tiles)])
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_make_rows_independent_of_the_batch(kit: Any, family: str) -> None:
    model = kit.build(family, sliding_window=6, tie_word_embeddings=True).load(map_rows=map_tiles)
    first, second = kit.prompt(21, seed=1), kit.prompt(13, seed=2)
    (alone,) = kit.Session(model).step([(1, first, 0)])
    session = kit.Session(model)
    mate, start = session.step([(2, second, 0), (1, first[:4], 0)])
    (rest,) = session.step([(1, first[4:], 4)])
    assert torch.equal(torch.cat([start, rest]), alone)
    assert torch.equal(kit.Session(model).step([(2, second, 0)])[0], mate)


def test_dynamic_scaling_in_tiles_is_independent_of_batch_mates(kit: Any) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    pair = kit.build("llama", max_position_embeddings=16, rope_parameters=parameters)
    model = pair.load(map_rows=map_tiles)
    short, long = kit.prompt(10, seed=1), kit.prompt(30, seed=2)
    (alone,) = kit.Session(model).step([(1, short, 0)])
    _, together = kit.Session(model).step([(2, long, 0), (1, short, 0)])
    assert torch.equal(together, alone)


class OutsideArithmetic(TorchDispatchMode):
    """Collects the operations on floating tensors that run while `is_outside` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.is_outside = True
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_outside and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.found.append(str(func))
        return result

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.is_outside = False
            try:
                return function(*args)
            finally:
                self.is_outside = True

        return call


@pytest.mark.parametrize("family", FAMILIES)
def test_no_arithmetic_on_rows_happens_outside_map_rows(kit: Any, family: str) -> None:
    watch = OutsideArithmetic()
    map_rows = watch.inside(lambda function, *tensors: function(*tensors))
    session = kit.Session(kit.build(family, tie_word_embeddings=True).load(map_rows=map_rows))
    session.step([(1, kit.prompt(9), 0)])  # grows the rotary tables
    inputs = session.inputs([(1, kit.prompt(9), 0)])
    with watch, torch.inference_mode():
        session.model.logits(session.model.forward(inputs, watch.inside(session.attention)))
    assert watch.found == []


def pick(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[], [12], [3, 20, 19], list(range(21))], ids=len)
def test_rows_with_logits_alone_have_the_bits_of_all_rows(kit: Any, family: str, rows: list[int]) -> None:
    """In tiles, where a row's bits depend on nothing else; keys and values are stored for all rows all the same."""
    model = kit.build(family, sliding_window=6, tie_word_embeddings=True).load(map_rows=map_tiles)
    prompt, after = kit.prompt(21, seed=1), kit.prompt(3, seed=2)
    whole, some = kit.Session(model), kit.Session(model)
    inputs = [one.inputs([(1, prompt, 0)]) for one in (whole, some)]
    wanted = torch.tensor(rows, dtype=torch.int64)
    with torch.inference_mode():
        hidden_TD = model.forward(inputs[0], whole.attention)
        hidden_RD = model.forward_rows(replace(inputs[1], logit_rows_R=wanted), some.attention, pick)
    assert torch.equal(hidden_RD, hidden_TD[rows])
    assert torch.equal(some.step([(1, after, 21)])[0], whole.step([(1, after, 21)])[0])


def test_loading_and_running_leave_the_callers_inputs_alone(kit: Any) -> None:
    pair = kit.build("llama")
    before = {name: tensor.clone() for name, tensor in pair.checkpoint.tensors.items()}
    session = pair.session()
    hidden_RD = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    kept = hidden_RD.clone()
    session.model.logits(hidden_RD)
    session.step([(1, kit.prompt(5), 0)])
    assert torch.equal(hidden_RD, kept)
    assert all(torch.equal(pair.checkpoint.tensors[name], tensor) for name, tensor in before.items())


def test_no_rows_give_no_logits(kit: Any) -> None:
    session = kit.build("llama").session()
    hidden_TD = session.model.forward(session.inputs([]), session.attention)
    assert hidden_TD.shape == (0, 48)
    assert session.model.logits(hidden_TD).shape == (0, 97)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), width=st.integers(2, 70), power=st.integers(-4, 4), seed=st.integers(0, 99))
def test_norms_equal_those_of_transformers(rows: int, width: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 10.0**power
    weight = torch.randn(width, generator=generator)
    for reference, offset in ((LlamaRMSNorm(width, 1e-6), 0.0), (Gemma3RMSNorm(width, 1e-6), 1.0)):
        reference.weight.data = weight.clone()
        with torch.inference_mode():
            torch.testing.assert_close(row_norm(weight, 1e-6, offset)(x), reference(x), atol=1e-6, rtol=1e-6)
            heads = head_norm([(weight, 2), (weight, 1)], 1e-6, offset)(x[:, None].expand(-1, 3, -1))
            torch.testing.assert_close(heads[:, 2], reference(x), atol=1e-6, rtol=1e-6)


def test_a_family_with_a_forward_of_its_own_needs_its_own_rows() -> None:
    """Else steps would compute the inherited rows, and say nothing."""
    with pytest.raises(TypeError, match="Other overrides forward; override forward_rows"):
        type("Other", (LlamaModel,), {"forward": lambda self, inputs, attend: None})


class StepFuser:
    """Computes nothing by itself. step: embedding, stack and head that a step was asked of."""

    asked: tuple[Any, ...] | None = None

    def layer(self, parts: Any) -> Any:
        return SimpleNamespace()

    def stack(self, layers: Any, ropes: Any) -> Any:
        return SimpleNamespace()

    def head(self, norm_D: torch.Tensor, eps: float, head: Any) -> Any:
        return SimpleNamespace()

    def step(self, embedding_VD: torch.Tensor, stack: Any, head: Any) -> Any:
        self.asked = embedding_VD, stack, head
        return lambda *given: given

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def placed_bytes(self, num_bytes: int) -> int:
        return num_bytes


def test_a_step_in_one_go_gets_the_ids_and_the_tables_that_reach_its_longest_sequence(kit: Any) -> None:
    fuser: Any = StepFuser()
    model = kit.build("llama", tie_word_embeddings=True).load(fuser=fuser)
    assert fuser.asked == (model._embedding_VD, model._stack, model._fused_head)
    inputs = kit.Session(model).inputs([(1, kit.prompt(1), 140), (2, kit.prompt(1), 3)])
    ids_T, positions_T, (cos_P1H, sin_P1H), _ = model.forward_logits(inputs, None)
    assert ids_T is inputs.token_ids_T
    assert positions_T is inputs.positions_T
    assert len(cos_P1H) == len(sin_P1H) >= 141
    wanted_T = torch.tensor([140, 3])
    assert torch.equal(cos_P1H[wanted_T], model._embedded(inputs)[1][0])
    assert torch.equal(sin_P1H[wanted_T], model._embedded(inputs)[1][1])


class OwnLogits(LlamaModel):
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(hidden_RD)


def test_what_lies_between_the_parts_of_a_step_leaves_it_to_them(kit: Any) -> None:
    """A scaled embedding, a soft cap, angles by length, and a family with functions of its own."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    llama = kit.build("llama")
    pairs = [kit.build("gemma3_text"), kit.build("llama", rope_parameters=dynamic), replace(llama, family=OwnLogits)]
    for pair in pairs:
        fuser: Any = StepFuser()
        model = pair.load(fuser=fuser)
        assert fuser.asked is None
        assert model.forward_logits(kit.Session(model).inputs([(1, kit.prompt(1), 0)]), None) is None
    capped: Any = StepFuser()
    model = llama.load(fuser=capped)
    assert capped.asked is not None
    model._soft_cap = 3.0
    assert model._fused_step() is None
