"""Prompts as arrays: made once for a lane, kept in its memory and nowhere else."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from sampler_cases import row, step

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.histories import outputs, texts
from pluglm_samplers.penalties import RepetitionConfig, RepetitionPenalty

PENALTY = SamplingParams(repetition_penalty=2.0)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, [5, 6, 7, 8, 9]), (1, [9]), (2, [8, 9]), (3, [7, 8, 9]), (9, [5, 6, 7, 8, 9])]
)
def test_a_window_is_the_end_of_prompt_and_output(window: int | None, expected: list[int]) -> None:
    one = row(prompt=(5, 6, 7), output=(8, 9))
    for asked in (one, replace(one, memory={})):
        for _ in range(2):  # the second time with what the first one left
            assert texts([asked], "owner", window)[0].tolist() == expected


def test_the_array_is_made_once_and_freed_with_its_lane() -> None:
    penalty = step("repetition_penalty", 10)
    one = replace(row(PENALTY, prompt=(1, 2)), memory={})
    penalty.apply(torch.ones(1, 10), [one])
    kept = weakref.ref(one.memory[penalty])  # type: ignore[index]
    penalty.apply(torch.ones(1, 10), [replace(one, output_token_ids=[3])])
    assert one.memory is not None
    assert one.memory[penalty] is kept()
    one.memory.clear()
    gc.collect()
    assert kept() is None


def test_steps_with_other_windows_share_a_lane() -> None:
    """By hand: tokens seen by both penalties of 2 are divided by 4, by one of them by 2."""
    last, whole = (RepetitionPenalty(RepetitionConfig(window=window), 5) for window in (1, None))
    one = replace(row(PENALTY, prompt=(1, 3)), memory={})
    for _ in range(2):
        logits_RV = whole.apply(last.apply(torch.full((1, 5), 8.0), [one]), [one])
        assert logits_RV.tolist() == [[8.0, 4.0, 8.0, 2.0, 8.0]]


def test_outputs_grow_branch_and_shrink_and_what_was_given_out_stays() -> None:
    """A lane's rows: one token after another, drafts that are refused, another branch, a shorter output, a long one."""
    memory: dict[object, object] = {}
    asked: list[list[int]] = [[4], [4, 5], [4, 5, 6, 7], [4, 5, 8], [4, 5, 6], [4, 5], [], [9] * 500, [9] * 500 + [1]]
    given = [outputs([replace(row(), output_token_ids=list(one), memory=memory)])[0] for one in asked]
    assert [one.tolist() for one in given] == asked
    growing = [outputs([replace(row(), output_token_ids=list(range(n)), memory={})])[0].tolist() for n in (0, 64, 65)]
    assert growing == [list(range(n)) for n in (0, 64, 65)]


def test_a_growing_output_is_written_once() -> None:
    memory: dict[object, object] = {}
    first, second = (outputs([replace(row(), output_token_ids=one, memory=memory)])[0] for one in ([4, 5], [4, 5, 6]))
    assert first.base is second.base
    assert second.tolist() == [4, 5, 6]
