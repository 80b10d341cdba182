"""Which steps a captured graph can run, and for how many rows. Knows no device and no tensor's contents but one.

Whole decode steps by batch bucket, as in vLLM and SGLang; the mechanism is in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import ModelSpec

BATCH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))

REPLAYED = "replayed"
CAPTURED = "captured, then replayed"
TOO_LONG = "a sequence is longer than graphs are captured for"


@dataclass(frozen=True, slots=True)
class GraphDecision:
    """How one step ran. reason: REPLAYED or CAPTURED with the graph's rows as bucket; else why it ran eagerly."""

    reason: str
    bucket: int | None = None


def bucket_of(num_rows: int, batch_sizes: tuple[int, ...]) -> int | None:
    """The least of the ascending batch_sizes that num_rows fit in."""
    index = bisect_left(batch_sizes, num_rows)
    return batch_sizes[index] if index < len(batch_sizes) else None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What holds for every step of a graph. max_blocks: of a block table; max_tokens: keys of a sequence."""

    max_blocks: int
    max_tokens: int

    @classmethod
    def of(cls, layout: KVLayout, spec: ModelSpec) -> StepLimits:
        max_tokens = min(spec.max_position, layout.num_blocks * layout.block_size)
        return cls(max_blocks=-(-max_tokens // layout.block_size), max_tokens=max_tokens)


def why_eager(inputs: ModelInput, limits: StepLimits) -> str | None:
    """Why no graph can run the step, or None. The reasons are few, so that they can be counted."""
    segments = inputs.segments
    if any(segment.num_keys > limits.max_tokens for segment in segments):
        return TOO_LONG
    if not segments:
        return "the step computes nothing"
    if inputs.groups:
        return "layers have block tables of their own"
    if inputs.copies:
        return "blocks are copied first"
    if any(segment.num_query != 1 for segment in segments):
        return "a sequence computes several tokens"
    if not _one_row_each(inputs.logit_rows_R, len(segments)):
        return "logits are not asked for once of every row in order"
    if any(len(segment.block_table) > limits.max_blocks for segment in segments):
        return f"a block table is longer than the {limits.max_blocks} blocks that graphs are captured for"
    return None


def _one_row_each(logit_rows_R: torch.Tensor, num_rows: int) -> bool:
    """The rows are host tensors here, so that comparing them waits for no device."""
    return len(logit_rows_R) == num_rows and torch.equal(logit_rows_R, torch.arange(num_rows))
