"""The native kernel reads and writes by address: what would lead it astray is refused before it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_tools import native_tools

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch, HeadRows
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kv.store import TensorKVStore
from pluglm.testing.context import make_context
from pluglm_attention.native_kernel import NativeKernel

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 6
LAYERS = tuple(
    LayerSpec(index=index, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=1.0) for index in (0, 1)
)
SPEC = ModelSpec(family="llama", hidden_size=64, vocab_size=8, max_position=512, layers=LAYERS)
SEGMENTS = (
    Segment(sequence_id=0, query_start=0, num_query=1, num_context=9, block_table=(3, 5)),
    Segment(sequence_id=1, query_start=1, num_query=2, num_context=0, block_table=(0,)),
)
SLOTS = (41, 0, 1)


@pytest.fixture(scope="module")
def kernel() -> NativeKernel:
    return NativeKernel(make_context(tools=native_tools()))


def store(num_blocks: int = BLOCKS, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> TensorKVStore:
    made = TensorKVStore(KVLayout(num_blocks=num_blocks, block_size=BLOCK), spec, "cpu", dtype)
    for index in (0, 1):
        made.keys(index).zero_(), made.values(index).zero_()
    return made


def rows(num_rows: int = 3, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> list[Any]:
    return [torch.zeros(num_rows, count, head_dim) for count in (heads, kv_heads, kv_heads)]


def run(
    kernel: NativeKernel, segments: Any = SEGMENTS, slots: Any = SLOTS, given: Any = None, kv: Any = None
) -> torch.Tensor:
    """By `run`, and then as the calls that a stack makes by itself: both must refuse alike."""
    slots_T = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int64)
    given, kv = given or rows(), kv or store()
    plan = kernel.plan(AttentionBatch(segments=segments, slots_T=slots_T, block_size=BLOCK))
    heads = HeadRows(*given, torch.empty_like(given[0]))
    refused = None
    try:
        out_TNH = kernel.run(LAYERS[0], *given, plan, kv)
    except ValueError as error:
        refused = error
    if refused is None:
        assert kernel.native_calls(LAYERS, heads, plan, kv) is not None
        return out_TNH
    with pytest.raises(ValueError, match=re.escape(str(refused))):
        kernel.native_calls(LAYERS, heads, plan, kv)
    raise refused


def test_what_fits_runs(kernel: NativeKernel) -> None:
    assert run(kernel).shape == (3, HEADS, HEAD_DIM)
    assert run(kernel, given=rows(5), slots=(41, 0, 1, 2, 3)).shape == (5, HEADS, HEAD_DIM)  # a row of no segment
    assert run(kernel, segments=(), slots=(), given=rows(0)).shape == (0, HEADS, HEAD_DIM)


def changed(**fields: Any) -> tuple[Segment, ...]:
    return (replace(SEGMENTS[0], **fields), SEGMENTS[1])


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (changed(block_table=(3,)), "1 blocks of 8 hold no 10 keys"),
        (changed(block_table=()), "0 blocks of 8 hold no 10 keys"),
        (changed(num_context=16), "2 blocks of 8 hold no 17 keys"),
        (changed(block_table=(3, 6)), "reach 56 slots, and the store has 48"),
        (changed(block_table=(3, -1)), "-1 is no slot and no block"),
        (changed(block_table=(3, 2**31)), "numbers of 31 bits"),
        (changed(query_start=-1), "numbers of 31 bits from 0"),
        (changed(num_context=-1), "numbers of 31 bits from 0"),
        (changed(query_start=3), "takes queries"),
        (changed(num_query=4, num_context=1), "takes queries"),
        (changed(block_table=(3, 5, *range(90))), "reach 720 slots, and the store has 48"),
        (changed(block_table=(3, 5, *[0] * 90, -7)), "-7 is no slot and no block"),
    ],
)  # fmt: skip
def test_segments_that_lead_astray_are_refused(kernel: NativeKernel, segments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(kernel, segments=segments)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((41, 0, 48), "reach 49 slots, and the store has 48"), ((41, -1, 1), "-1 is no slot"),
        (torch.tensor([41, 0, 1], dtype=torch.int32), "slots as dense int64, not torch.int32"),
        (torch.zeros(6, dtype=torch.int64)[::2], "slots as dense int64"), ((41, 0, 1, 2), "takes queries"),
        ((*range(99), -3), "-3 is no slot"), ((*range(40), *range(40)), "takes queries"),
    ],
)  # fmt: skip
def test_slots_that_lead_astray_are_refused(kernel: NativeKernel, slots: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(kernel, slots=slots)


def test_rows_and_storage_of_another_shape_or_dtype_are_refused(kernel: NativeKernel) -> None:
    q, k, v = rows()
    wrong_rows = [
        rows(heads=2), rows(kv_heads=1), rows(head_dim=8), [q, k[:2], v], [q, k, v[:2]], [q, k.double(), v],
        [q, k, v.bfloat16()],
    ]  # fmt: skip
    for given in wrong_rows:
        with pytest.raises(ValueError, match=r"the native attention takes (queries|keys|values)"):
            run(kernel, given=given)
    narrow = replace(SPEC, layers=tuple(replace(one, num_kv_heads=1) for one in LAYERS))
    for kv in (store(spec=narrow), store(dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the native attention takes stored keys"):
            run(kernel, kv=kv)
    with pytest.raises(ValueError, match="the store has 40"):
        run(kernel, kv=store(num_blocks=5))
    assert run(kernel).shape == (3, HEADS, HEAD_DIM)  # one that was refused leaves nothing behind


def test_what_is_known_of_heads_that_come_again_refuses_what_does_not_fit_them(kernel: NativeKernel) -> None:
    q, k, v = rows()
    heads, kv = HeadRows(q, k, v, torch.empty_like(q)), store()

    def calls(segments: Any = SEGMENTS, slots: Any = SLOTS, given: Any = heads, into: Any = kv) -> Any:
        slots_T = torch.tensor(slots, dtype=torch.int64)
        plan = kernel.plan(AttentionBatch(segments=segments, slots_T=slots_T, block_size=BLOCK))
        return kernel.native_calls(LAYERS, given, plan, into), plan

    (_, plan), (second, other) = calls(), calls()
    assert plan.table.addresses != other.table.addresses
    fresh = NativeKernel(make_context(tools=native_tools())).native_calls(LAYERS, heads, other, kv)
    assert fresh is not None
    assert second.calls == fresh.calls
    smaller = store(num_blocks=5)
    for wrong in (
        {"slots": (41, 0, 48)}, {"slots": (41, 0, 1, 2)}, {"segments": changed(query_start=3)},
        {"segments": changed(block_table=(3, 6))}, {"into": smaller}, {"into": store(dtype=torch.bfloat16)},
        {"given": HeadRows(q, k[:2], v, q)},
    ):  # fmt: skip
        assert calls()[0] is not None
        with pytest.raises(ValueError, match=r"the native attention takes|the store has"):
            calls(**wrong)
