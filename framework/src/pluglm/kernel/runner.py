"""One loaded model with its attention and KV memory: turns plan items into a flat batch and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.kv import KVManager, KVStore
from pluglm.kernel.interfaces.model import Model, ModelSpec


class ModelRunner:
    """Runs flat batches. `attention` is opaque here: it goes through to the backend with the KV store."""

    def __init__(self, backend: Backend, model: Model, attention: Any, kv: KVManager, store: KVStore) -> None:
        self.backend, self.model, self.attention, self.kv, self.store = backend, model, attention, kv, store
        self.spec: ModelSpec = model.spec

    def make_input(
        self,
        parts: Sequence[tuple[int, Sequence[int], int]],
        all_rows: bool = False,
        num_rows: Sequence[int] | None = None,
        copies: tuple[tuple[int, int], ...] = (),
    ) -> ModelInput:
        """A batch from (sequence_id, new token ids, number already computed) per sequence.

        Logits are asked for the last num_rows[i] tokens of part i; by default for the last one, or for all.
        """
        block_size = self.kv.layout.block_size
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for index, (sequence_id, token_ids, num_context) in enumerate(parts):
            table = self.kv.block_table(sequence_id)
            count = len(token_ids)
            segment = Segment(
                sequence_id=sequence_id,
                query_start=len(tokens),
                num_query=count,
                num_context=num_context,
                block_table=table,
            )
            segments.append(segment)
            tokens.extend(token_ids)
            positions.extend(range(num_context, num_context + count))
            slots.extend(table[p // block_size] * block_size + p % block_size for p in positions[-count:])
            wanted = count if all_rows else (num_rows[index] if num_rows is not None else 1)
            rows.extend(range(len(tokens) - wanted, len(tokens)))
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
