"""The plugins' Triton kernels in triton's interpreter: steps through a KV store, and plans that are filled again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from triton import knobs

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch, GraphAttention
from pluglm.kernel.interfaces.kv_format import KVRow, SymmetricCodes
from pluglm.testing.attention import spec_of
from pluglm.testing.attention_cases import batch_of, fresh_store, make_case, new_rows, reference
from pluglm.testing.attention_formats import decoded, encoded_store
from pluglm.testing.context import make_context
from pluglm.testing.kv_format import nearest_codes
from pluglm_attention.bounds import ROUNDED_WEIGHTS
from pluglm_attention.kernel_choice import KernelConfig
from pluglm_attention.paged import PagedAttention
from pluglm_attention.torch_kernels import TorchKernel
from pluglm_attention.triton_kernels import CODES, TritonFlash, TritonPaged, find_rows

# Prefill, decode, a cached prefix and all of them in one batch.
LENGTHS = (14, 3, 15)
STEPS = [[(0, 12), (1, 2)], [(0, 1), (1, 1), (2, 11)], [(0, 1), (2, 4)]]


class TableKV:
    """A format by the definition of its codes: the nearest of a table, as the contract kit of formats finds it."""

    def __init__(self, codes: SymmetricCodes) -> None:
        self.codes, self.bits = codes, torch.int8 if codes.value_dtype == torch.int8 else torch.uint8

    def row(self, head_dim: int) -> KVRow:
        return KVRow(code_dtype=self.bits, num_codes=head_dim, scale_dtype=torch.float32, num_scales=1)

    def encode(self, x_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = nearest_codes(x_TKH.float(), self.codes)
        return codes.view(self.bits), scales

    def decode(self, codes_TKH: torch.Tensor, scales_TK1: torch.Tensor) -> torch.Tensor:
        return codes_TKH.view(self.codes.value_dtype).float() * scales_TK1

    def symmetric(self) -> SymmetricCodes:
        return self.codes


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("codes", CODES, ids=lambda codes: str(codes.value_dtype))
def test_codes_are_written_and_read_in_the_kernels(
    world: Any, codes: SymmetricCodes, window: int | None, dtype: torch.dtype
) -> None:
    """Stored to the bit as the format encodes; results within the bound of float64 over what that stands for, and so
    are those of the torch kernel."""
    kv_format: Any = TableKV(codes)
    layer = world.layer(4, 2, 16, window=window)
    case = make_case(layer, [(12, 1), (0, 9), (14, 4), (3, 1)], block_size=4, shuffled=True, dtype=dtype)
    store, same, batch = (*(encoded_store(case, kv_format, "cpu") for _ in range(2)), batch_of(case, "cpu"))
    kernels = (TritonPaged(codes), store), (TorchKernel.paged(kv_format), same)
    expected = reference(decoded(case, kv_format))
    for kernel, kept in kernels:
        out_TNH = kernel.run(layer, *new_rows(case, "cpu"), kernel.plan(batch), kept)  # type: ignore[attr-defined]
        assert out_TNH.dtype == dtype
        bound = ROUNDED_WEIGHTS[str(dtype).removeprefix("torch.")]
        torch.testing.assert_close(out_TNH.double(), expected, rtol=0, atol=bound)
    assert all(map(torch.equal, store.parts(0), same.parts(0)))


@pytest.mark.parametrize("codes", CODES, ids=lambda codes: str(codes.value_dtype))
def test_chunks_and_decode_store_the_same_codes(world: Any, codes: SymmetricCodes) -> None:
    kv_format: Any = TableKV(codes)
    layer, parts = world.layer(2, 1, 16), []
    for cuts in ((0, 13), (0, 5, 12, 13), tuple(range(14))):
        whole = make_case(layer, [(0, 13)], block_size=4)
        store, kernel = encoded_store(whole, kv_format, "cpu"), TritonPaged(codes)
        for first, last in itertools.pairwise(cuts):
            case = dataclasses.replace(whole, lengths=((first, last - first),))
            kernel.run(layer, *new_rows(case, "cpu"), kernel.plan(batch_of(case, "cpu")), store)
        parts.append(store.parts(0))
    assert all(map(torch.equal, parts[0], parts[1]))
    assert all(map(torch.equal, parts[0], parts[2]))


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
