"""The plugins' Triton kernels in triton's interpreter: steps through a KV store, and plans that are filled again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch, GraphAttention
from pluglm.testing.attention import spec_of
from pluglm.testing.attention_cases import batch_of, fresh_store, make_case, new_rows, reference
from pluglm.testing.context import make_context
from pluglm_attention.kernel_choice import KernelConfig
from pluglm_attention.paged import PagedAttention
from pluglm_attention.triton_kernels import TritonFlash, TritonPaged, find_rows

# Prefill, decode, a cached prefix and all of them in one batch.
LENGTHS = (14, 3, 15)
STEPS = [[(0, 12), (1, 2)], [(0, 1), (1, 1), (2, 11)], [(0, 1), (2, 4)]]


def test_kernels_are_interpreted() -> None:
    assert knobs.runtime.interpret


@pytest.mark.parametrize("kind", [TritonFlash, TritonPaged])
@pytest.mark.parametrize(("window", "scattered"), [(None, False), (9, True)])
def test_steps(world: Any, kind: type[Any], window: int | None, scattered: bool) -> None:
    layer = world.layer(2, 1, 16, window=window)
    sequences = [world.tokens(layer, count, seed) for seed, count in enumerate(LENGTHS)]
    outputs = world.run(kind(), layer, sequences, STEPS, 4, scattered)
    for tokens, out_PNH in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(out_PNH.double(), world.reference(layer, tokens), rtol=0, atol=2e-5)


def test_a_plan_is_filled_with_another_batch(world: Any) -> None:
    """As a graph does it: three rows, of which the batch has two, and one slots_T with new contents."""
    layer = world.layer(2, 1, 16)
    case = make_case(layer, [(20, 1), (7, 1)], block_size=4, shuffled=True)
    batch, store = batch_of(case, "cpu"), fresh_store(case, spec_of(layer), "cpu")
    spare = case.blocks[-1]
    dummy = [
        Segment(sequence_id=-1, query_start=row, num_query=1, num_context=0, block_table=(spare,)) for row in range(3)
    ]
    slots_T = torch.full((3,), spare * 4)
    kernel = TritonPaged()
    plan = kernel.static_plan(AttentionBatch(segments=tuple(dummy), slots_T=slots_T, block_size=4), 8)
    address = plan.on_device.packed.data_ptr()
    slots_T[:2] = batch.slots_T
    filled = AttentionBatch(segments=(*batch.segments, dummy[2]), slots_T=slots_T, block_size=4)
    kernel.refill(plan, filled)
    assert plan.on_device.packed.data_ptr() == address
    rows = (torch.cat((x, torch.zeros_like(x[:1]))) for x in new_rows(case, "cpu"))
    out_TNH = kernel.run(layer, *rows, plan, store)
    torch.testing.assert_close(out_TNH[:2].double(), reference(case), rtol=0, atol=2e-5)


def test_the_plugin_offers_the_plans_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonPaged()
    monkeypatch.setattr("pluglm_attention.paged.build_kernel", lambda *arguments: kernel)
    attention = PagedAttention(KernelConfig(), make_context())
    assert isinstance(attention, GraphAttention)
    assert attention.refill == kernel.refill


def test_a_plan_of_a_step_is_not_filled_again(world: Any) -> None:
    batch = batch_of(make_case(world.layer(1, 1, 16), [(3, 1)]), "cpu")
    kernel = TritonPaged()
    with pytest.raises(ValueError, match="static_plan"):
        kernel.refill(kernel.plan(batch), batch)


def test_keys_side_by_side_are_read_in_place() -> None:
    segments = (
        Segment(sequence_id=0, query_start=0, num_query=2, num_context=9, block_table=(3, 4, 5)),
        Segment(sequence_id=1, query_start=2, num_query=1, num_context=4, block_table=(7, 0)),
    )
    batch = AttentionBatch(segments=segments, slots_T=torch.zeros(3, dtype=torch.int64), block_size=4)
    gathered = find_rows(batch, None)
    assert gathered.on_device.first_rows.tolist() == [0, 11]
    assert gathered.slots_S is not None
    assert gathered.slots_S.tolist() == [*range(12, 23), 28, 29, 30, 31, 0]
    in_place = find_rows(batch, 1)  # of the second, only the key in block 0 is seen: position 0 would be 4 rows before
    assert in_place.slots_S is None
    assert in_place.on_device.first_rows.tolist() == [12, -4]
