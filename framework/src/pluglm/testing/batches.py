"""Builds flat batches from sequences and a KV manager's tables, the way the engine does. No model knowledge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.interfaces.kv import KVManager

# T: tokens of the flat batch, R: rows with logits

Part = tuple[int, Sequence[int], int]  # (sequence id, new token ids, tokens already computed)


def slots_at(block_table: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Where the tokens at these positions of a sequence are stored."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def new_slots(segment: Segment, block_size: int) -> list[int]:
    """Where the new tokens of a segment are stored."""
    return slots_at(segment.block_table, range(segment.num_context, segment.num_keys), block_size)


def flat_input(parts: Sequence[Part], kv: KVManager, all_rows: bool = True, device: str = "cpu") -> ModelInput:
    """The ModelInput of the parts, whose KV must have been extended; logits for every row or each part's last."""
    size, start, segments = kv.layout.block_size, 0, []
    for sequence_id, token_ids, num_computed in parts:
        num_blocks = -(-(num_computed + len(token_ids)) // size)
        table = kv.block_table(sequence_id)[:num_blocks]
        segments.append(
            Segment(
                sequence_id=sequence_id,
                query_start=start,
                num_query=len(token_ids),
                num_context=num_computed,
                block_table=table,
            )
        )
        start += len(token_ids)
    positions = [p for segment in segments for p in range(segment.num_context, segment.num_keys)]
    rows = list(range(start)) if all_rows else [one.query_start + one.num_query - 1 for one in segments]
    return ModelInput(
        token_ids_T=_ids([token for _, tokens, _ in parts for token in tokens], device),
        positions_T=_ids(positions, device),
        slots_T=_ids([slot for segment in segments for slot in new_slots(segment, size)], device),
        logit_rows_R=_ids(rows, device),
        segments=tuple(segments),
        block_size=size,
    )


def _ids(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def grow(kv: KVManager, sequence_id: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Make room for num_tokens of a sequence in a transaction of its own; returns the copies to do."""
    transaction = kv.transaction()
    try:
        kv.block_table(sequence_id)
    except KeyError:
        transaction.acquire(sequence_id)
    transaction.extend(sequence_id, num_tokens)
    return transaction.commit()
