"""One loaded model with its attention and KV memory: turns plan items into a flat batch and runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from pluglm.kernel.core import BlockCopies, Chunk, GroupInput, ModelInput, Segment, new_segment
from pluglm.kernel.interfaces.backend import Backend, LaunchingBackend
from pluglm.kernel.interfaces.kv import GroupTable, KVGroup, KVManager, KVStore, LayerGroups
from pluglm.kernel.interfaces.model import Model, ModelSpec


class ModelRunner:
    """Runs flat batches. `attention` is opaque here: it goes through to the backend with the KV store."""

    def __init__(self, backend: Backend, model: Model, attention: Any, kv: KVManager, store: KVStore) -> None:
        self.backend, self.model, self.attention, self.kv, self.store = backend, model, attention, kv, store
        self.spec: ModelSpec = model.spec

    def make_input(
        self, chunks: Sequence[Chunk], num_rows: Sequence[int] | None = None, copies: BlockCopies = ()
    ) -> ModelInput:
        """A flat batch. Logits are asked for the last num_rows[i] tokens of chunk i; by default for the last one."""
        block_size, has_groups = self.kv.layout.block_size, bool(self.kv.layout.groups)
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for index, (sequence_id, token_ids, num_computed, num_prompt) in enumerate(chunks):
            table = () if has_groups else self.kv.block_table(sequence_id)
            segments.append(new_segment(sequence_id, len(tokens), len(token_ids), num_computed, table, num_prompt))
            tokens += token_ids
            positions += range(num_computed, num_computed + len(token_ids))
            rows += range(len(tokens) - (1 if num_rows is None else num_rows[index]), len(tokens))
        slots_T = torch.empty(0, dtype=torch.int64) if has_groups else _slots(segments, block_size)
        return ModelInput(
            token_ids_T=_indices(tokens),
            positions_T=_indices(positions),
            slots_T=slots_T,
            logit_rows_R=_indices(rows),
            segments=tuple(segments),
            block_size=block_size,
            copies=copies,
            groups=self._groups(segments) if has_groups else (),
        )

    def _groups(self, segments: Sequence[Segment]) -> tuple[GroupInput, ...]:
        layout, manager = self.kv.layout, cast(LayerGroups, self.kv)
        tables = [manager.group_tables(one.sequence_id) for one in segments]
        inputs = []
        for index, group in enumerate(layout.groups):
            own = [_behind(one, group, table[index]) for one, table in zip(segments, tables, strict=True)]
            inputs.append(GroupInput(layers=group.layers, segments=tuple(own), slots_T=_slots(own, layout.block_size)))
        return tuple(inputs)

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """logits_RV float32 of inputs.logit_rows_R; the KV of every row is stored."""
        return self.backend.execute(self.model, inputs, self.attention, self.store)

    def run_beside(self, inputs: ModelInput, meanwhile: Callable[[], None]) -> torch.Tensor:
        """`run` on a LaunchingBackend; meanwhile, which raises nothing, is called while that computes."""
        wait = cast(LaunchingBackend, self.backend).launch(self.model, inputs, self.attention, self.store)
        meanwhile()
        return wait()


def _slots(segments: Sequence[Segment], block_size: int) -> torch.Tensor:
    """slots_T of the new tokens."""
    return _indices([slot for one in segments for slot in one.slots(block_size, one.num_context)])


def _indices(values: list[int]) -> torch.Tensor:
    """int64, by way of numpy, which reads a list in a third of the time that torch takes."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _behind(segment: Segment, group: KVGroup, table: GroupTable) -> Segment:
    """The segment as a group sees it that gave back leading tokens."""
    num_context = segment.num_context - table.num_dropped
    if table.num_dropped and (group.window is None or num_context < group.window - 1):
        raise ValueError(
            f"KV sequence {segment.sequence_id} gave back its first {table.num_dropped} tokens, "
            f"position {segment.num_context} of a layer with a window of {group.window} sees some of them"
        )
    return replace(segment, num_context=num_context, block_table=table.blocks)
