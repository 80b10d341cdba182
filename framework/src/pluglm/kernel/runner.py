"""One loaded model with its attention and KV memory: turns plan items into a flat batch and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pluglm.kernel.core import BlockCopies, Chunk, ModelInput, Segment
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.kv import KVManager, KVStore
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
        block_size = self.kv.layout.block_size
        segments: list[Segment] = []
        tokens: list[int] = []
        rows: list[int] = []
        for index, chunk in enumerate(chunks):
            segment = Segment(
                sequence_id=chunk.sequence_id,
                query_start=len(tokens),
                num_query=len(chunk.token_ids),
                num_context=chunk.num_computed,
                block_table=self.kv.block_table(chunk.sequence_id),
                num_prompt=chunk.num_prompt,
            )
            segments.append(segment)
            tokens.extend(chunk.token_ids)
            rows.extend(range(len(tokens) - (1 if num_rows is None else num_rows[index]), len(tokens)))
        positions = [p for one in segments for p in range(one.num_context, one.num_keys)]
        slots = [slot for one in segments for slot in one.slots(block_size, one.num_context)]
        return ModelInput(
            token_ids_T=torch.tensor(tokens, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            slots_T=torch.tensor(slots, dtype=torch.int64),
            logit_rows_R=torch.tensor(rows, dtype=torch.int64),
            segments=tuple(segments),
            block_size=block_size,
            copies=copies,
        )

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """logits_RV float32 of inputs.logit_rows_R; the KV of every row is stored."""
        return self.backend.execute(self.model, inputs, self.attention, self.store)
