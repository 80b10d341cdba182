"""The part of the backend kit about groups of layers: stores of several pools, and batches with tables for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from pluglm.arguments import silent
from pluglm.kernel.core import GroupInput, ModelInput, Segment
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.testing.batches import new_slots
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.checkpoints import MemoryCheckpoint
from pluglm.testing.tiny_model import CONFIG, LoopAttention, TinyModel, tiny_shapes

Build = Callable[[], Backend]
PLAIN = KVLayout(num_blocks=5, block_size=4)
WINDOW = 3
GROUPED = KVLayout(
    num_blocks=8,
    block_size=4,
    groups=(KVGroup(layers=(1,), num_blocks=3, window=WINDOW), KVGroup(layers=(0,), num_blocks=5)),
)
TEXT = [3, 17, 5, 3, 11, 8, 2, 19, 4, 30, 1]
NUM_DROPPED = 4  # of the 8 tokens before the last step, which sees those from 6 on where there is a window


class WindowedTinyModel(TinyModel):
    """The second of its two layers sees a window."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        spec = super().read_spec(config)
        return replace(spec, layers=(spec.layers[0], replace(spec.layers[1], window=WINDOW)))


def backend_group_checks(build: Build) -> Iterator[Check]:
    """Every check of a backend that provides kv:layer_groups."""
    for function in CHECKS:
        yield make_check(function, build)


def groups_have_pools_of_their_size(build: Build) -> None:
    store = build().allocate_kv(GROUPED, WindowedTinyModel.read_spec(CONFIG))
    found = [len(one(layer)) for layer in (0, 1) for one in (store.keys, store.values)]
    expect(found == [20, 20, 12, 12], "5 blocks of 4 slots in layer 0 and 3 in layer 1", found)


def copies_stay_in_their_group(build: Build) -> None:
    """Blocks 0 to 2 of the layout are layer 1's, 3 to 7 are layer 0's."""
    store = build().allocate_kv(GROUPED, WindowedTinyModel.read_spec(CONFIG))
    for layer in (0, 1):
        for stored in (store.keys(layer), store.values(layer)):
            blocks = torch.arange(len(stored), device=stored.device) // 4
            stored.copy_(blocks.reshape(-1, 1, 1).expand_as(stored).to(stored.dtype))
    store.copy_blocks([(0, 1), (3, 7), (5, 6)])
    for layer, expected in ((0, [0, 1, 2, 2, 0]), (1, [0, 0, 2])):
        for stored in (store.keys(layer), store.values(layer)):
            found = [int(stored[slot].flatten()[-1]) for slot in range(0, len(stored), 4)]
            expect(found == expected, f"the blocks {expected} in layer {layer}", found)


def layers_read_through_the_tables_of_their_group(build: Build) -> None:
    """A sequence in two steps: the rows are those of one table for all layers, also behind dropped tokens."""
    expected = _rows(build(), PLAIN, _plain_batch)
    found = _rows(build(), GROUPED, _grouped_batch)
    error = float((found - expected).abs().max() / expected.abs().max())
    expect(error <= 1e-4, "the rows of one table, within 1e-4 of the largest logit", f"{error:.3g}")


def _rows(backend: Backend, layout: KVLayout, batch: Callable[[int, int], ModelInput]) -> torch.Tensor:
    """logits_TV of TEXT, computed in steps of 8 and 3 tokens."""
    checkpoint = MemoryCheckpoint(CONFIG, tiny_shapes(CONFIG))
    model = backend.load_model(WindowedTinyModel, checkpoint, None, silent)
    attention: Any = LoopAttention()
    store = backend.allocate_kv(layout, model.spec)
    return torch.cat([backend.execute(model, batch(*step), attention, store).cpu() for step in ((0, 8), (8, 11))])


def _segment(start: int, stop: int, table: tuple[int, ...], num_dropped: int = 0) -> Segment:
    return Segment(
        sequence_id=1, query_start=0, num_query=stop - start, num_context=start - num_dropped, block_table=table
    )


def _batch(start: int, stop: int, segment: Segment, slots: list[int], groups: tuple[GroupInput, ...]) -> ModelInput:
    return ModelInput(
        token_ids_T=torch.tensor(TEXT[start:stop]),
        positions_T=torch.arange(start, stop),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        logit_rows_R=torch.arange(stop - start),
        segments=(segment,),
        block_size=4,
        groups=groups,
    )


def _plain_batch(start: int, stop: int) -> ModelInput:
    segment = _segment(start, stop, (4, 1, 3))
    return _batch(start, stop, segment, new_slots(segment, 4), ())


def _grouped_batch(start: int, stop: int) -> ModelInput:
    """The window's table is blocks 2 and 0 at first, and 0 and 1 behind what was dropped."""
    num_dropped = NUM_DROPPED if start else 0
    window = _segment(start, stop, (0, 1) if start else (2, 0), num_dropped)
    everything = _segment(start, stop, (4, 0, 2))
    parts = zip(GROUPED.groups, (window, everything), strict=True)
    groups = tuple(
        GroupInput(layers=group.layers, segments=(one,), slots_T=torch.tensor(new_slots(one, 4)))
        for group, one in parts
    )
    return _batch(start, stop, _segment(start, stop, ()), [], groups)


CHECKS = (groups_have_pools_of_their_size, copies_stay_in_their_group, layers_read_through_the_tables_of_their_group)
