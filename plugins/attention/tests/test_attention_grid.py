"""Every attention within its declared bound of the float64 answer, over a sample that covers all pairs of shapes."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from attention_grid import FACTORS, case_of, covering_sample, exact
from attention_tools import native_tools

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention import spec_of
from pluglm.testing.attention_cases import Case, fresh_store, make_case, run_case
from pluglm.testing.context import make_context
from pluglm.testing.stores import PlainStore
from pluglm_attention.flash import FlashAttention
from pluglm_attention.naive import NaiveAttention
from pluglm_attention.paged import PagedAttention
from pluglm_attention.sdpa import SdpaAttention

KINDS: list[tuple[type[Any], dict[str, str]]] = [
    (NaiveAttention, {}),
    (SdpaAttention, {}),
    *((cls, {"kernel": name}) for cls in (FlashAttention, PagedAttention) for name in ("native", "tiled", "torch")),
]
SAMPLE = covering_sample()


def kind_id(kind: tuple[type[Any], dict[str, str]]) -> str:
    return "-".join([kind[0].__name__, *kind[1].values()])


def build(kind: tuple[type[Any], dict[str, str]], layer: LayerSpec, dtype: torch.dtype) -> Attention:
    cls, config = kind
    tools = native_tools() if config.get("kernel") == "native" else None
    name = str(dtype).removeprefix("torch.")
    context = make_context(spec=spec_of(layer), dtype=name, max_model_len=4097, tools=tools)
    attention: Attention = cls(cls.Config(**config), context)
    return attention


def check(kind: tuple[type[Any], dict[str, str]], case: Case, expected: torch.Tensor) -> None:
    dtype = case.texts[0].q_SNH.dtype
    attention = build(kind, case.layer, dtype)
    found = run_case(attention, case, fresh_store(case, spec_of(case.layer), "cpu"), "cpu")
    assert found.dtype == dtype
    bound = kind[0].ERROR_BOUNDS[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@cache
def known(number: int) -> tuple[Case, torch.Tensor]:
    case = case_of(SAMPLE[number])
    return case, exact(case)


@pytest.mark.parametrize("number", range(len(SAMPLE)))
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_within_the_bound(kind: tuple[type[Any], dict[str, str]], number: int) -> None:
    case, expected = known(number)
    if reason := refusal(kind, SAMPLE[number]):
        with pytest.raises(IncompatibleError, match=reason):
            build(kind, case.layer, SAMPLE[number]["dtype"])
        return
    check(kind, case, expected)


def refusal(kind: tuple[type[Any], dict[str, str]], row: dict[str, Any]) -> str | None:
    """What a plugin must say that cannot compute the row; anything else it must compute."""
    if kind[0] is SdpaAttention and row["soft_cap"] is not None:
        return "no soft cap"
    if kind[1].get("kernel") == "native" and row["dtype"] == torch.float16:
        return "the dtype is torch.float16"
    return None


def test_the_sample_covers_every_pair() -> None:
    for one, other in itertools.combinations(FACTORS, 2):
        pairs = set(itertools.product(FACTORS[one], FACTORS[other]))
        assert {(row[one], row[other]) for row in SAMPLE} == pairs, (one, other)


@cache
def long_prompt() -> tuple[Case, torch.Tensor]:
    layer = LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=64, scale=0.125)
    case = make_case(layer, [(0, 4097)], block_size=16, shuffled=True)
    return case, exact(case)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "tiled" not in kind[1].values()], ids=kind_id)
def test_a_whole_long_prompt(kind: tuple[type[Any], dict[str, str]]) -> None:
    check(kind, *long_prompt())


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_a_batch_of_nothing(kind: tuple[type[Any], dict[str, str]]) -> None:
    layer = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    store = PlainStore(KVLayout(num_blocks=2, block_size=16), spec_of(layer), torch.float32)
    attention = build(kind, layer, torch.float32)
    plan = attention.plan(AttentionBatch(segments=(), slots_T=torch.empty(0, dtype=torch.int64), block_size=16))
    rows = torch.empty((0, 4, 64)), torch.empty((0, 2, 64)), torch.empty((0, 2, 64))
    assert attention.run(layer, *rows, plan, store).shape == (0, 4, 64)
    assert not store.keys(0).any()
