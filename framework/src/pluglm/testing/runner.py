"""A second model for drafters under test: logits are a table over the tokens read back through the real block tables.

A drafter that feeds a stale, shifted or unfinished cache gets other logits, so its mistake shows in its proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from pluglm.kernel.core import Chunk, ModelInput
from pluglm.kernel.interfaces.kv import KVManager
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kernel.interfaces.services import TokenizerView
from pluglm.testing.batches import flat_input, slots_at
from pluglm.testing.block_kv import BlockPool
from pluglm.testing.tokenizers import TinyTokenizer

NUM_BLOCKS, BLOCK_SIZE = 256, 4


class TableRunner:
    """A Runner of 320 logits. Position 0 holds the first token; the token most likely next depends on all before it."""

    def __init__(self) -> None:
        layer = LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
        self.spec = ModelSpec(family="table", hidden_size=1, vocab_size=320, max_position=512, layers=(layer,))
        self.kv: KVManager = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self._stored = [0] * (NUM_BLOCKS * BLOCK_SIZE)

    def make_input(self, chunks: Sequence[Chunk]) -> ModelInput:
        return flat_input([chunk[:3] for chunk in chunks], self.kv, all_rows=False)

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """logits_RV float32."""
        self._copy(inputs.copies)
        for slot, token in zip(inputs.slots_T.tolist(), inputs.token_ids_T.tolist(), strict=True):
            self._stored[slot] = token
        row_of = {}
        for segment in inputs.segments:
            for offset in range(segment.num_query):
                row_of[segment.query_start + offset] = self._logits(segment.block_table, segment.num_context + offset)
        return torch.stack([row_of[row] for row in inputs.logit_rows_R.tolist()])

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        before = list(self._stored)
        for source, target in copies:
            moved = before[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
            self._stored[target * BLOCK_SIZE : (target + 1) * BLOCK_SIZE] = moved

    def _logits(self, block_table: tuple[int, ...], position: int) -> torch.Tensor:
        stored = (self._stored[slot] for slot in slots_at(block_table, range(position + 1), BLOCK_SIZE))
        return table_row(table_state(stored), self.spec.vocab_size)


def table_state(token_ids: Iterable[int]) -> int:
    """0 to 996; every token changes it."""
    state = 17
    for token in token_ids:
        state = (state * 1_103_515_245 + token + 12_345) % 2_147_483_647
    return state % 997


@lru_cache(1024)  # few states, many rows of them
def table_row(state: int, width: int) -> torch.Tensor:
    """logits_V of a state."""
    row = torch.arange(width, dtype=torch.float64)
    # ids past the tokenizer's are padding of the head and never likely
    return torch.where(row < 262, (row * (state + 1) % 263) / 50.0, -9.0).float()


def build_runner(model: str) -> tuple[TableRunner, TokenizerView]:
    """A fresh TableRunner and its tokenizer, whatever model is named."""
    return TableRunner(), TinyTokenizer()
