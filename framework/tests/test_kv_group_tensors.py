"""Groups of layers where tensors come in: stores, batches, the choice of a plan, and copies in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pluglm.backends.execute import execute_batch, inputs_on
from pluglm.backends.fake_model import FakeKVStore
from pluglm.kernel.core import Chunk, ModelInput
from pluglm.kernel.interfaces.kv import GroupTable, KVGroup, KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kernel.memory import read_blocks, write_blocks
from pluglm.kernel.runner import ModelRunner
from pluglm.kv.store import TensorKVStore

GROUPS = (KVGroup(layers=(0, 2), num_blocks=3, window=5), KVGroup(layers=(1,), num_blocks=6))
LAYOUT = KVLayout(num_blocks=9, block_size=4, groups=GROUPS)
LAYERS = tuple(
    LayerSpec(index=i, num_heads=2, num_kv_heads=1, head_dim=dim, scale=1.0, window=window)
    for i, (dim, window) in enumerate([(3, 5), (2, None), (4, 5)])
)
SPEC = ModelSpec(family="llama", hidden_size=8, vocab_size=16, max_position=64, layers=LAYERS)
UNUSED: Any = None


def filled_store() -> TensorKVStore:
    store = TensorKVStore(LAYOUT, SPEC, "cpu", torch.float32)
    for layer in range(3):
        for number, stored in enumerate((store.keys(layer), store.values(layer))):
            stored.copy_(torch.arange(len(stored))[:, None, None].expand_as(stored) + 100 * (2 * layer + number))
    return store


def blocks_of(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(-1, 4, *stored.shape[1:])


def test_layers_have_the_blocks_of_their_group() -> None:
    store = filled_store()
    assert [tuple(store.keys(layer).shape) for layer in range(3)] == [(12, 1, 3), (24, 1, 2), (12, 1, 4)]
    assert [tuple(store.values(layer).shape) for layer in range(3)] == [(12, 1, 3), (24, 1, 2), (12, 1, 4)]


def test_copies_are_of_the_layers_of_their_group() -> None:
    """Blocks 0 to 2 are the first group's, 3 to 8 the second's, whose block 3 is its first."""
    store, before = filled_store(), filled_store()
    store.copy_blocks([(0, 2), (3, 8), (8, 4)])
    for stored, old in ((one(layer), two(layer)) for layer in (0, 2) for one, two in _sides(store, before)):
        assert torch.equal(blocks_of(stored), blocks_of(old)[[0, 1, 0]])
    for stored, old in ((one(1), two(1)) for one, two in _sides(store, before)):
        assert torch.equal(blocks_of(stored), blocks_of(old)[[0, 5, 2, 3, 4, 0]])


def _sides(one: TensorKVStore, two: TensorKVStore) -> list[tuple[Any, Any]]:
    return [(one.keys, two.keys), (one.values, two.values)]


def test_the_fake_store_keeps_groups_apart() -> None:
    store = FakeKVStore(LAYOUT)
    store.keys(0)[:] = 1
    store.keys(1)[:] = 2
    assert store.keys(2).flatten().tolist() == [1] * 12
    assert store.keys(1).flatten().tolist() == [2] * 24
    assert set(store.values(1).flatten().tolist()) == {-1}
    store.keys(1)[:4] = 7
    store.copy_blocks([(3, 8)])
    assert store.keys(1)[20:].flatten().tolist() == [7] * 4


class Tables:
    """A KV manager's answers for two sequences; the first has given back 8 tokens of its window."""

    layout = LAYOUT

    def __init__(self, num_dropped: int = 8) -> None:
        self.first = (GroupTable(num_dropped, (2, 0)), GroupTable(0, (4, 1, 3, 0)))

    def group_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        return self.first if sequence_id == 1 else (GroupTable(0, (1,)), GroupTable(0, (5,)))


def batch_of(num_dropped: int = 8, num_computed: int = 13) -> ModelInput:
    kv: Any = Tables(num_dropped)
    runner = ModelRunner(UNUSED, SimpleNamespace(spec=SPEC), UNUSED, kv, UNUSED)  # type: ignore[arg-type]
    return runner.make_input([Chunk(1, [7, 8], num_computed, 9), Chunk(2, [3], 0)])


def test_a_batch_has_tables_and_slots_for_each_group() -> None:
    inputs = batch_of()
    assert inputs.positions_T.tolist() == [13, 14, 0]
    assert inputs.slots_T.tolist() == []
    assert [(one.num_context, one.num_keys, one.block_table) for one in inputs.segments] == [(13, 15, ()), (0, 1, ())]
    windows, everything = inputs.groups
    assert windows.layers == (0, 2)
    assert everything.layers == (1,)
    # behind 8 dropped tokens, positions 13 and 14 are 5 and 6: in the second block of the table, which is block 0
    assert windows.slots_T.tolist() == [1, 2, 4]
    assert [(one.num_context, one.num_query, one.query_start) for one in windows.segments] == [(5, 2, 0), (0, 1, 2)]
    assert everything.slots_T.tolist() == [1, 2, 20]
    assert [one.num_context for one in everything.segments] == [13, 0]
    assert [one.num_prompt for one in windows.segments] == [9, 0]


def test_a_query_that_sees_dropped_tokens_is_refused() -> None:
    """With a window of 5, position 12 sees the tokens from 8 on, and 11 sees token 7."""
    assert batch_of(num_computed=12).groups[0].segments[0].num_context == 4
    with pytest.raises(ValueError, match=r"sequence 1 gave back its first 8 tokens, position 11 .* window of 5 sees"):
        batch_of(num_computed=11)


def test_every_layer_runs_with_the_plan_of_its_group() -> None:
    ran: list[tuple[int, Any]] = []

    class Attention:
        def plan(self, batch: Any) -> Any:
            return batch

        def run(self, layer: LayerSpec, q: Any, k: Any, v: Any, plan: Any, kv: Any) -> Any:
            ran.append((layer.index, (plan.segments, plan.slots_T.tolist(), plan.block_size)))
            return q

    class Model:
        spec = SPEC

        def forward(self, inputs: ModelInput, attend: Any) -> torch.Tensor:
            for layer in LAYERS:
                attend(layer, None, None, None)
            return torch.zeros(3, 8)

        def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
            return hidden_RD

    inputs = inputs_on(batch_of(), "cpu")
    model: Any = Model()
    attention: Any = Attention()
    execute_batch(model, inputs, attention, filled_store())
    expected = [(one.segments, one.slots_T.tolist(), 4) for one in inputs.groups]
    assert ran == [(0, expected[0]), (1, expected[1]), (2, expected[0])]


def test_host_copies_come_back_behind_what_was_dropped_since() -> None:
    """Saved with 4 tokens dropped, put back with 8: the window's first saved block is not needed any more."""
    store, before = filled_store(), filled_store()
    window, everything = GroupTable(4, (1, 2)), GroupTable(0, (5, 0, 2, 4))
    saved = read_blocks(store, (window, everything, window), 10)  # block 4 holds room only
    assert saved.num_dropped == (4, 0, 4)
    assert [len(one) for one in saved.data] == [2, 2, 3, 3, 2, 2]
    for layer in range(3):
        store.keys(layer).zero_()
        store.values(layer).zero_()
    window, everything = GroupTable(8, (0, 1)), GroupTable(0, (3, 1, 4, 2))
    write_blocks(store, (window, everything, window), saved)
    for side, old in _sides(store, before):
        for layer in (0, 2):
            assert torch.equal(blocks_of(side(layer))[0], blocks_of(old(layer))[2])
            assert not blocks_of(side(layer))[1:].any()
        assert torch.equal(blocks_of(side(1))[[3, 1, 4]], blocks_of(old(1))[[5, 0, 2]])
        assert not blocks_of(side(1))[[0, 2, 5]].any()


def test_host_copies_of_a_plain_store_are_of_the_computed_blocks() -> None:
    layout = KVLayout(num_blocks=4, block_size=4)
    store = TensorKVStore(layout, SPEC, "cpu", torch.float32)
    for layer in range(3):
        store.keys(layer).copy_(torch.rand(store.keys(layer).shape))
        store.values(layer).copy_(torch.rand(store.values(layer).shape))
    wanted = blocks_of(store.values(2))[[3, 1]].clone()
    saved = read_blocks(store, (GroupTable(0, (3, 1, 0)),) * 3, 8)
    store.values(2).zero_()
    write_blocks(store, (GroupTable(0, (0, 2, 1)),) * 3, saved)
    assert torch.equal(blocks_of(store.values(2))[[0, 2]], wanted)
    assert not blocks_of(store.values(2))[[1, 3]].any()
