"""What sdpa decides before it computes: refusals, keys read in place, batched decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.errors import IncompatibleError
from pluglm_attention.sdpa import SdpaAttention
from pluglm_attention.sdpa_plan import DecodePart, KeyRange, SegmentPart, plan_parts


def segment(start: int, num_query: int, num_context: int, *table: int) -> Segment:
    return Segment(
        sequence_id=start, query_start=start, num_query=num_query, num_context=num_context, block_table=table
    )


def plan(*segments: Segment, window: int | None = None) -> tuple[Any, ...]:
    return plan_parts(segments, 4, window, torch.device("cpu"), torch.float32)


def test_soft_cap_is_refused_when_built(world: Any) -> None:
    with pytest.raises(IncompatibleError, match=r"soft cap.*layer 0.*naive"):
        world.build(SdpaAttention, world.layer(4, 2, 16, soft_cap=30.0))


def test_deterministic_runs_are_refused_with_a_reason() -> None:
    assert "naive" in SdpaAttention.capabilities(SdpaAttention.Config()).refuses["run:deterministic"]


def test_consecutive_blocks_are_read_in_place() -> None:
    (part,) = plan(segment(0, 1, 9, 5, 6, 7))
    assert isinstance(part, SegmentPart)
    assert part.keys == KeyRange(first_slot=20, num_keys=10)
    assert part.mask_QS is None
    assert not part.is_causal


def test_a_window_moves_the_first_key_and_may_make_blocks_consecutive() -> None:
    (part,) = plan(segment(0, 1, 9, 1, 6, 7), window=6)
    assert isinstance(part, SegmentPart)
    assert part.keys == KeyRange(first_slot=24, num_keys=6)


def test_scattered_blocks_are_gathered() -> None:
    (part,) = plan(segment(0, 1, 5, 7, 2))
    assert isinstance(part, SegmentPart)
    assert isinstance(part.keys, torch.Tensor)
    assert part.keys.tolist() == [28, 29, 30, 31, 8, 9]


def test_first_chunk_needs_no_mask_and_a_later_one_does() -> None:
    (first,), (later,) = plan(segment(0, 6, 0, 0, 1)), plan(segment(0, 2, 4, 0, 1))
    assert isinstance(first, SegmentPart)
    assert isinstance(later, SegmentPart)
    assert first.is_causal
    assert first.mask_QS is None
    assert later.mask_QS is not None
    assert torch.isinf(later.mask_QS).tolist() == [[False] * 5 + [True], [False] * 6]


def test_decodes_share_one_call_and_short_ones_are_filled_with_their_own_slot() -> None:
    decodes, prefill = plan(segment(0, 1, 5, 7, 2), segment(1, 1, 1, 3), segment(2, 3, 0, 4))
    assert isinstance(decodes, DecodePart)
    assert isinstance(prefill, SegmentPart)
    assert decodes.rows == slice(0, 2)
    assert decodes.slots.tolist() == [28, 29, 30, 31, 8, 9, 12, 13, 12, 12, 12, 12]
    assert decodes.mask_B11S is not None
    assert torch.isinf(decodes.mask_B11S[1, 0, 0]).tolist() == [False, False, True, True, True, True]
    assert prefill.rows == slice(2, 5)
