"""Stores of a KV format: codes and scales are copied, taken to the host and brought back together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.backends.graph_backend import GraphBackend
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.scratch_store import ScratchKVStore
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.kv import GroupTable, KVGroup, KVLayout
from pluglm.kernel.interfaces.kv_format import PartedStore, stored_parts
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kernel.memory import read_blocks, write_blocks
from pluglm.kv.cache_access import read_slots, write_slots
from pluglm.kv.store import TensorKVStore
from pluglm.testing.kv_formats import NibbleKV

FORMAT = NibbleKV(ComponentConfig(), "cpu", torch.float32)
GROUPS = (KVGroup(layers=(0, 2), num_blocks=3, window=5), KVGroup(layers=(1,), num_blocks=6))
GROUPED = KVLayout(num_blocks=9, block_size=4, groups=GROUPS)
PLAIN = KVLayout(num_blocks=6, block_size=4)
LAYERS = tuple(
    LayerSpec(index=i, num_heads=2, num_kv_heads=heads, head_dim=dim, scale=1.0, window=window)
    for i, (heads, dim, window) in enumerate([(1, 8, 5), (2, 4, None), (1, 16, 5)])
)
SPEC = ModelSpec(family="llama", hidden_size=8, vocab_size=16, max_position=64, layers=LAYERS)


def filled(layout: KVLayout) -> TensorKVStore:
    """Every number of a slot names its block, counted within the layer, and its part."""
    store = TensorKVStore(layout, SPEC, "cpu", torch.float32, kv_format=FORMAT)
    for layer in range(3):
        for number, part in enumerate(store.parts(layer)):
            blocks = torch.arange(len(part)) // layout.block_size
            part.copy_((blocks + 10 * number)[:, None, None].expand_as(part))
    return store


def blocks_of(part: torch.Tensor) -> list[int]:
    return [int(one) for one in part[::4, 0, 0]]


@pytest.mark.parametrize("layout", [PLAIN, GROUPED])
def test_parts_have_the_formats_shapes(layout: KVLayout) -> None:
    store = filled(layout)
    slots = [12, 24, 12] if layout is GROUPED else [24] * 3
    for layer, count in zip(LAYERS, slots, strict=True):
        codes, scales = (count, layer.num_kv_heads, layer.head_dim // 2), (count, layer.num_kv_heads, 2)
        assert [tuple(part.shape) for part in store.parts(layer.index)] == [codes, codes, scales, scales]
        assert [part.dtype for part in store.parts(layer.index)] == [torch.uint8] * 2 + [torch.bfloat16] * 2
        assert store.keys(layer.index) is store.parts(layer.index)[0]
        assert store.values(layer.index) is store.parts(layer.index)[1]


def test_without_a_format_there_are_keys_and_values() -> None:
    store = TensorKVStore(PLAIN, SPEC, "cpu", torch.float16)
    assert isinstance(store, PartedStore)
    assert [part.dtype for part in stored_parts(store, 1)] == [torch.float16] * 2


def test_copies_move_scales_of_the_group_alone() -> None:
    store = filled(GROUPED)
    store.copy_blocks([(0, 2), (3, 8), (8, 4)])
    for layer, expected in ((0, [0, 1, 0]), (1, [0, 5, 2, 3, 4, 0]), (2, [0, 1, 0])):
        for number, part in enumerate(store.parts(layer)):
            assert blocks_of(part) == [one + 10 * number for one in expected]


def test_blocks_go_to_the_host_and_come_back_into_others() -> None:
    """Layer 1 keeps all tokens, the others have dropped one block, and one more by the time it comes back."""
    store = filled(GROUPED)
    window, whole = GroupTable(4, (2, 0)), GroupTable(0, (5, 1, 3))
    saved = read_blocks(store, (window, whole, window), 12)
    assert len(saved.data) == 3 * 4
    assert sum(one.nbytes for one in saved.data) == sum(
        2 * layer.num_kv_heads * FORMAT.row(layer.head_dim).num_bytes * 4 * count
        for layer, count in zip(LAYERS, (2, 3, 2), strict=True)
    )
    for layer in range(3):
        for part in store.parts(layer):
            part.zero_()
    write_blocks(store, (GroupTable(8, (1,)), GroupTable(0, (0, 2, 4)), GroupTable(8, (1,))), saved)
    for number in range(4):
        for layer in (0, 2):
            assert blocks_of(store.parts(layer)[number]) == [0, 10 * number, 0]  # block 0 of before, in block 1
        written = [5 + 10 * number, 0, 1 + 10 * number, 0, 3 + 10 * number, 0]
        assert blocks_of(store.parts(1)[number]) == written


def test_slots_are_read_and_written_with_their_scales() -> None:
    store, slots = filled(PLAIN), torch.tensor([23, 0, 9])
    data = read_slots(store, range(3), slots)
    assert [int(one[0].flatten()[0]) for one in data[:4]] == [5, 15, 25, 35]
    target = torch.tensor([4, 5, 6])
    write_slots(store, range(3), target, data)
    for layer in range(3):
        for part in store.parts(layer):
            assert torch.equal(part[target], part[slots])


def test_a_backend_with_graphs_has_a_scratch_block_in_every_part() -> None:
    graphs: Any = object()  # never asked
    backend = GraphBackend("cpu", torch.float32, DenseLinear, whole_rows, 1, graphs)
    store = backend.allocate_encoded_kv(PLAIN, SPEC, FORMAT)
    assert isinstance(store, ScratchKVStore)
    for layer in range(3):
        for part, whole in zip(store.parts(layer), store.whole.parts(layer), strict=True):
            assert (len(part), len(whole)) == (24, 28)
            assert part.data_ptr() == whole.data_ptr()
            assert part.is_contiguous()
