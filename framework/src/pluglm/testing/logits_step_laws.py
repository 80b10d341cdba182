"""The part of the kit of logits steps about laws: a row's result depends on the row alone, not on ids or a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import expect
from pluglm.testing.logits_step_subject import INF, VOCAB_SIZE, Subject, apply, random_rows

# R: rows, V: vocabulary


def rows_do_not_mix(subject: Subject) -> None:
    """A row has the same bits alone, and in any order."""
    step, logits_RV, rows = subject.build(), random_rows(12, 3), subject.rows(12)
    together = apply(step, logits_RV, rows)
    for index in range(12):
        alone = apply(step, logits_RV[index : index + 1], rows[index : index + 1])
        expect(torch.equal(alone[0], together[index]), f"the bits of row {index} alone", "others in a batch of 12")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    permuted = apply(step, logits_RV[order], [rows[index] for index in order])
    expect(torch.equal(permuted, together[order]), "the same bits in another order of rows", "others")


def neighbours_params_do_not_matter(subject: Subject) -> None:
    """Every second row has other values of the same parameters."""
    other = subject.other()
    if other is None:
        return
    step, logits_RV, rows = subject.build(), random_rows(10, 11), subject.rows(10)
    mixed = [replace(row, params=other) if index % 2 else row for index, row in enumerate(rows)]
    together = apply(step, logits_RV, mixed)
    for index in range(10):
        alone = apply(step, logits_RV[index : index + 1], mixed[index : index + 1])
        expect(torch.equal(alone[0], together[index]), f"the bits of row {index} alone", "others beside other params")


def a_window_is_its_rows(subject: Subject) -> None:
    """Rows of one request behind drafts: each has its own history, though seed and lane are the same."""
    step, logits_RV, text = subject.build(), random_rows(9, 12), subject.row(4).output_token_ids
    rows = [subject.row(4, output_token_ids=text[:size], position=size) for size in range(4, 13)]
    together = apply(step, logits_RV, rows)
    for index in range(9):
        alone = apply(step, logits_RV[index : index + 1], rows[index : index + 1])
        expect(torch.equal(alone[0], together[index]), f"the bits of row {index} of a window alone", "others")


def broken_rows_stay_alone(subject: Subject) -> None:
    """NaN, +inf and a row of which nothing is left are somebody else's fault; the rows beside them are as they were."""
    step, logits_RV, rows = subject.build(), random_rows(8, 13), subject.rows(8)
    expected = apply(step, logits_RV, rows)
    logits_RV[1, 2], logits_RV[4, 9], logits_RV[6] = float("nan"), INF, -INF
    found = apply(step, logits_RV, rows)
    for index in (0, 2, 3, 5, 7):
        expect(torch.equal(found[index], expected[index]), f"row {index} as without broken neighbours", "other bits")
    expect(not bool((found[6] > -INF).any()), "a row of -inf to stay one", "a token")


def tokens_have_no_names(subject: Subject) -> None:
    """With other ids everywhere, in logits, histories and params, the result has them, too. (Ties aside.)"""
    order = [(token + 5) % VOCAB_SIZE for token in range(VOCAB_SIZE)]
    logits_RV, rows = random_rows(40, 14), subject.rows(40)
    found = apply(subject.build(), logits_RV, rows)
    renamed_RV = torch.empty_like(logits_RV)
    renamed_RV[:, order] = logits_RV
    renamed = apply(subject.build(), renamed_RV, [_renamed(row, order) for row in rows])[:, order]
    same = torch.equal(renamed > -INF, found > -INF) and torch.allclose(renamed, found, rtol=1e-4, atol=1e-4)
    expect(same, "the renamed result for renamed ids", "another one")


def _renamed(row: SampleRow, order: list[int]) -> SampleRow:
    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {order[token]: bias for token, bias in value.items()}
        return tuple(rename(one) if isinstance(one, tuple) else order[one] for one in value)

    params = row.params
    changes = {name: rename(value) for name in ID_FIELDS if (value := getattr(params, name))}
    return replace(
        row,
        params=params.model_copy(update=changes),
        prompt_token_ids=rename(row.prompt_token_ids),
        output_token_ids=list(rename(row.output_token_ids)),
    )


ID_FIELDS = tuple(SamplingParams().token_ids())


def shifts_keep_the_set(subject: Subject) -> None:
    """A constant on top of a row changes no probability, so a truncation keeps the same tokens.

    The logits are multiples of 2**-10 and the constant is 16, so that float32 shifts them without rounding.
    """
    logits_RV = (random_rows(60, 15) * 1024).round() / 1024
    found = apply(subject.build(), logits_RV, subject.rows(60)) > -INF
    shifted = apply(subject.build(), logits_RV + 16.0, subject.rows(60)) > -INF
    moved = int((found != shifted).any(1).sum())
    expect(moved == 0, "the same tokens kept when 16 is added to a row", f"other ones in {moved} of 60 rows")


def hard_masks_ignore_logits(subject: Subject) -> None:
    """What a hard mask bans depends on the row's text and params alone, and what it leaves has its bits."""
    one_RV, two_RV, rows = random_rows(30, 16), random_rows(30, 17), subject.rows(30)
    first, second = (apply(subject.build(), logits_RV, rows) for logits_RV in (one_RV, two_RV))
    expect(torch.equal(first > -INF, second > -INF), "the same tokens banned whatever the logits", "other ones")
    expect(torch.equal(first[first > -INF], one_RV[first > -INF]), "the bits of what is left", "others")


LAWS: tuple[Callable[[Subject], None], ...] = (
    rows_do_not_mix,
    neighbours_params_do_not_matter,
    a_window_is_its_rows,
    broken_rows_stay_alone,
    tokens_have_no_names,
    shifts_keep_the_set,
)
