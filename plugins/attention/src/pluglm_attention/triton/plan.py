"""What the layers of a step share on the device: where queries, keys and blocks are. Imports no triton."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pluglm.kernel.core import Segment

# S: segments, B: blocks of the longest table

# Kernels are compiled anew for pointers that are no multiple of 16 bytes, so each part of a packed plan starts at one.
_ALIGNMENT = 16


class KVScales(NamedTuple):
    """Of quantised storage: float32 [slots, K], contiguous; a stored code times its scale is the value."""

    k_SK: torch.Tensor
    v_SK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """cu_query int32 [S + 1]: first rows, then the number of rows; num_context int32 [S]; block_tables int32 [S, B],
    filled up with 0. All are views of `packed`, one int32 tensor on the device.

    num_tokens and max_query count rows; max_keys bounds a segment's keys.
    """

    packed: torch.Tensor
    cu_query: torch.Tensor
    num_context: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    num_tokens: int
    max_query: int
    max_keys: int

    @property
    def num_segments(self) -> int:
        return self.num_context.shape[0]

    def update(self, other: TritonPlan) -> None:
        """Takes over another plan in place, for launches in a CUDA graph. ValueError unless of the same sizes."""
        mine, its = (
            (plan.block_tables.shape, plan.block_size, plan.num_tokens, plan.max_query, plan.max_keys)
            for plan in (self, other)
        )
        if mine != its:
            raise ValueError(f"a plan of sizes {its} cannot take the place of one of sizes {mine}")
        self.packed.copy_(other.packed, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPlan:
    """As TritonPlan, for keys in consecutive rows: first_rows int32 [S] is the row of each segment's position 0."""

    cu_query: torch.Tensor
    num_context: torch.Tensor
    first_rows: torch.Tensor
    num_tokens: int


def plan_paged(
    segments: Sequence[Segment],
    block_size: int,
    device: torch.device,
    *,
    num_segments: int | None = None,
    max_blocks: int | None = None,
) -> TritonPlan:
    """The plan of a step, in one copy to the device. Segments must be in the order of their rows, without gaps.

    num_segments, max_blocks: sizes to fill up to, so that steps of one bucket have plans of one size. A segment filled
    in is one more row that sees no key, and gets zeros. ValueError when there is no room for the segments.
    """
    _check_order(segments)
    missing = (num_segments or len(segments)) - len(segments)
    width = max_blocks or max((len(one.block_table) for one in segments), default=0)
    if missing < 0 or any(len(one.block_table) > width for one in segments):
        raise ValueError(f"{len(segments)} segments of up to {width} blocks do not fit {num_segments} x {max_blocks}")
    starts = [one.query_start for one in segments]
    end = segments[-1].query_start + segments[-1].num_query if segments else 0
    starts += range(end, end + missing + 1)
    contexts = [one.num_context for one in segments] + [-1] * missing
    tables = _rows((one.block_table for one in segments), width, missing)
    packed, (cu_query, num_context, flat_tables) = _pack((starts, contexts, tables), device)
    longest = max((one.num_keys for one in segments), default=0)
    return TritonPlan(
        packed=packed,
        cu_query=cu_query,
        num_context=num_context,
        block_tables=flat_tables.view(len(contexts), width),
        block_size=block_size,
        num_tokens=starts[-1],
        max_query=max([one.num_query for one in segments] + [1] * (missing > 0), default=0),
        max_keys=longest if max_blocks is None else max_blocks * block_size,
    )


def plan_flash(segments: Sequence[Segment], first_rows: Sequence[int], device: torch.device) -> FlashPlan:
    """first_rows[i]: the row of keys and values that holds position 0 of segments[i]; its keys follow, in order."""
    _check_order(segments)
    num_tokens = segments[-1].query_start + segments[-1].num_query if segments else 0
    starts = [one.query_start for one in segments] + [num_tokens]
    _, (cu_query, num_context, rows) = _pack((starts, [one.num_context for one in segments], first_rows), device)
    return FlashPlan(cu_query=cu_query, num_context=num_context, first_rows=rows, num_tokens=num_tokens)


def _check_order(segments: Sequence[Segment]) -> None:
    row = 0
    for segment in segments:
        if segment.query_start != row:
            raise ValueError(f"segment {segment.sequence_id} starts at row {segment.query_start}, not at {row}")
        row += segment.num_query


def _rows(tables: Iterable[Sequence[int]], width: int, missing: int) -> array[int]:
    """The tables one behind the other, each filled up to the width with 0, then `missing` more of 0."""
    rows = array("i")
    for table in tables:
        rows.extend(table)
        rows.extend([0] * (width - len(table)))
    rows.extend([0] * (width * missing))
    return rows


def _pack(parts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One int32 tensor on the device, and the views of it that are the parts."""
    step = _ALIGNMENT // 4
    sizes = [-(-len(part) // step) * step for part in parts]
    values = array("i")
    for part, size in zip(parts, sizes, strict=True):
        values.extend(_rows([part], size, 0))
    host = torch.frombuffer(values, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    packed = host.to(device, non_blocking=True)
    return packed, [piece[: len(part)] for piece, part in zip(torch.split(packed, sizes), parts, strict=True)]
