"""The tensor store: layout, copies as if all sources were read first, and forks that never see each other's writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kv.contiguous import ContiguousKV
from pluglm.kv.paged import PagedKV
from pluglm.kv.store import TensorKVStore

LAYERS = tuple(
    LayerSpec(index=i, num_heads=4, num_kv_heads=heads, head_dim=dim, scale=1.0)
    for i, (heads, dim) in enumerate([(2, 3), (1, 5)])
)
SPEC = ModelSpec(family="llama", hidden_size=8, vocab_size=16, max_position=64, layers=LAYERS)


def store_of(layout: KVLayout) -> TensorKVStore:
    store = TensorKVStore(layout, SPEC, "cpu", torch.float32)
    for layer in range(2):
        for tensor in (store.keys(layer), store.values(layer)):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return store


def test_each_layer_has_its_own_shape() -> None:
    store = store_of(KVLayout(num_blocks=3, block_size=4))
    assert store.keys(0).shape == (12, 2, 3)
    assert store.values(1).shape == (12, 1, 5)


def test_copies_read_all_sources_first() -> None:
    store = store_of(KVLayout(num_blocks=4, block_size=2))
    before = [store.keys(0).clone(), store.values(1).clone()]
    store.copy_blocks([(0, 1), (1, 2), (2, 0)])
    for tensor, old in zip((store.keys(0), store.values(1)), before, strict=True):
        assert torch.equal(tensor, torch.cat((old[4:6], old[0:2], old[2:4], old[6:8])))


def build(kind: Any, config: dict[str, int]) -> Any:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BuildContext))
    fields.update(max_num_seqs=4, max_model_len=32, kv_bytes=1 << 20, bytes_per_token=8)
    return kind(kind.Config(**config), BuildContext(**fields))


def grow(manager: Any, store: TensorKVStore, sequence_id: int, tokens: list[float], new: list[float]) -> None:
    """What an engine and a backend do for new tokens: extend, copy, then write them into their slots."""
    transaction = manager.transaction()
    transaction.extend(sequence_id, len(tokens) + len(new))
    store.copy_blocks(transaction.commit())
    for value in new:
        store.keys(0)[slot(manager, sequence_id, len(tokens))] = value
        tokens.append(value)


def slot(manager: Any, sequence_id: int, position: int) -> int:
    size = manager.layout.block_size
    return int(manager.block_table(sequence_id)[position // size] * size + position % size)


def stored(manager: Any, store: TensorKVStore, sequence_id: int, count: int) -> list[float]:
    return [float(store.keys(0)[slot(manager, sequence_id, p), 0, 0]) for p in range(count)]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (PagedKV, {"block_size": 4, "num_blocks": 12}),
        (PagedKV, {"block_size": 1, "num_blocks": 40}),
        (ContiguousKV, {"num_regions": 4, "region_tokens": 24}),
    ],
)
@pytest.mark.parametrize("num_shared", [3, 4, 6])
def test_diverging_forks_keep_their_own_tokens(kind: Any, config: dict[str, int], num_shared: int) -> None:
    manager = build(kind, config)
    store = store_of(manager.layout)
    tokens: dict[int, list[float]] = {0: []}
    transaction = manager.transaction()
    transaction.acquire(0)
    transaction.commit()
    grow(manager, store, 0, tokens[0], [float(i) for i in range(num_shared)])
    transaction = manager.transaction()
    transaction.fork(0, 1)
    transaction.fork(0, 2)
    transaction.commit()
    tokens |= {1: list(tokens[0]), 2: list(tokens[0])}
    for turn in range(3):
        for sequence_id in (2, 0, 1):
            new = [100.0 * sequence_id + 10 * turn + i for i in range(turn + 1)]
            grow(manager, store, sequence_id, tokens[sequence_id], new)
            manager.audit()
            for other, expected in tokens.items():
                assert stored(manager, store, other, len(expected)) == expected
