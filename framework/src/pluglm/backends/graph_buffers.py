"""The fixed input of a captured decode step, and how a batch is brought into it. Knows addresses, no graphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from pluglm.backends.graph_buckets import StepLimits
from pluglm.backends.transfers import fill
from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.interfaces.attention import AttentionBatch

# B: rows of the graph, R: rows of a step, at most B


class DecodeBuffers:
    """Token ids, positions and slots of B rows on the device, first those of dummy rows.

    A dummy row is a sequence of one token in the scratch block. All of them write the same slot; what they read there
    is nobody's, and rows do not see one another.
    """

    def __init__(self, num_rows: int, block_size: int, scratch_block: int, limits: StepLimits, device: str) -> None:
        self._block_size, self._limits = block_size, limits
        self._dummies = tuple(_dummy(row, scratch_block) for row in range(num_rows))
        # Padding of token ids, positions and slots; the rows of a batch are laid over it.
        self._padding_3B = torch.tensor([[0], [0], [scratch_block * block_size]]).repeat(1, num_rows)
        self._static_3B = self._padding_3B.to(device, copy=True)
        self._token_ids_B, self._positions_B, self._slots_B = self._static_3B.unbind()
        self._rows_B = torch.arange(num_rows, device=device)

    def inputs(self) -> ModelInput:
        """The batch that the graph is captured with.

        Its segments have the greatest length, so that tables which the model makes on the host as far as they are
        needed (rotary angles) are whole and never move again.
        """
        longest = tuple(replace(one, num_context=self._limits.max_tokens - 1) for one in self._dummies)
        return ModelInput(
            token_ids_T=self._token_ids_B,
            positions_T=self._positions_B,
            slots_T=self._slots_B,
            logit_rows_R=self._rows_B,
            segments=longest,
            block_size=self._block_size,
        )

    def dummy_batch(self) -> AttentionBatch:
        return self._batch(())

    def fill(self, inputs: ModelInput) -> AttentionBatch:
        """Queues the copies of a batch of R rows on the host; returns it as the attention is to see it, of B rows."""
        num_rows = len(inputs.segments)
        host_3B = self._padding_3B.clone()
        torch.stack((inputs.token_ids_T, inputs.positions_T, inputs.slots_T), out=host_3B[:, :num_rows])
        fill(self._static_3B, host_3B)
        return self._batch(inputs.segments)

    def _batch(self, segments: tuple[Segment, ...]) -> AttentionBatch:
        filled = segments + self._dummies[len(segments) :]
        return AttentionBatch(segments=filled, slots_T=self._slots_B, block_size=self._block_size)


def _dummy(row: int, scratch_block: int) -> Segment:
    return Segment(sequence_id=-1, query_start=row, num_query=1, num_context=0, block_table=(scratch_block,))
