"""What the layers of one step share in the sdpa attention: where each query's keys lie, and who may see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm_attention.scores import visible
from pluglm_attention.slots import first_slot_if_consecutive, first_visible_key, key_slots

# B: sequences of a decode batch, Q: queries of one segment, S: keys (of the longest sequence, in a decode batch)

# Above this many keys, one call a sequence on views beats one batched call, which must first copy all keys.
LONG_ENOUGH_FOR_VIEWS = 256


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys in consecutive slots, read in place."""

    first_slot: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One sequence. keys: a range, or slots_S to gather; mask_QS: added to the scores; is_causal: without a mask."""

    rows: slice
    keys: KeyRange | torch.Tensor
    mask_QS: torch.Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Several sequences with one query each, in rows that lie side by side.

    slots: int64 [B * S], short sequences are filled up with their own first slot; mask_B11S hides that, None if equal.
    """

    rows: slice
    slots: torch.Tensor
    mask_B11S: torch.Tensor | None


Part = SegmentPart | DecodePart


def plan_parts(
    segments: tuple[Segment, ...], block_size: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Part, ...]:
    """The calls of one layer with this window: decode segments together, the others one by one."""
    decodes = [segment for segment in segments if segment.num_query == 1]
    if len(decodes) < 2 or not _side_by_side(decodes) or _prefers_views(decodes, block_size, window):
        busy = (segment for segment in segments if segment.num_query > 0)
        return tuple(_segment_part(segment, block_size, window, device, dtype) for segment in busy)
    others = [segment for segment in segments if segment.num_query > 1]
    rest = [_segment_part(segment, block_size, window, device, dtype) for segment in others]
    return (_decode_part(decodes, block_size, window, device, dtype), *rest)


def _side_by_side(decodes: list[Segment]) -> bool:
    first = decodes[0].query_start
    return all(segment.query_start == first + i for i, segment in enumerate(decodes))


def _prefers_views(decodes: list[Segment], block_size: int, window: int | None) -> bool:
    firsts = [first_visible_key(segment.num_context, window) for segment in decodes]
    if max(s.num_keys - first for s, first in zip(decodes, firsts, strict=True)) < LONG_ENOUGH_FOR_VIEWS:
        return False
    pairs = zip(decodes, firsts, strict=True)
    return all(first_slot_if_consecutive(segment, block_size, first) is not None for segment, first in pairs)


def _segment_part(
    segment: Segment, block_size: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> SegmentPart:
    first_key = first_visible_key(segment.num_context, window)
    first_slot = first_slot_if_consecutive(segment, block_size, first_key)
    keys: KeyRange | torch.Tensor
    if first_slot is None:
        keys = key_slots(segment, block_size, device, first_key)
    else:
        keys = KeyRange(first_slot, segment.num_keys - first_key)
    rows = slice(segment.query_start, segment.query_start + segment.num_query)
    sees_all_before = window is None or segment.num_keys <= window
    if segment.num_query == 1 or (segment.num_context == 0 and sees_all_before):
        return SegmentPart(rows, keys, None, is_causal=segment.num_query > 1)
    queries_Q = torch.arange(segment.num_context, segment.num_keys, device=device)
    mask_QS = visible(queries_Q, torch.arange(first_key, segment.num_keys, device=device), window)
    return SegmentPart(rows, keys, _additive(mask_QS, dtype), is_causal=False)


def _decode_part(
    decodes: list[Segment], block_size: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> DecodePart:
    firsts = [first_visible_key(segment.num_context, window) for segment in decodes]
    slots = [key_slots(s, block_size, device, first) for s, first in zip(decodes, firsts, strict=True)]
    lengths = [len(slots_S) for slots_S in slots]
    longest = max(lengths)
    rows = slice(decodes[0].query_start, decodes[0].query_start + len(decodes))
    if min(lengths) == longest:
        return DecodePart(rows, torch.cat(slots), None)
    filled = [torch.cat((x, x[:1].expand(longest - len(x)))) for x in slots]
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    mask_BS = _additive(torch.arange(longest, device=device) < lengths_B1, dtype)
    return DecodePart(rows, torch.cat(filled), mask_BS[:, None, None, :])


def _additive(visible_keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible and -inf elsewhere: what sdpa makes of a bool mask in every call, made once."""
    mask = torch.zeros(visible_keys.shape, dtype=dtype, device=visible_keys.device)
    return mask.masked_fill_(~visible_keys, float("-inf"))
