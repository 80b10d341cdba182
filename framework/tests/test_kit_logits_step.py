"""The kit of logits steps is tested: a plain truncation passes, and each check has a step that fails only that one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.logits_step import logits_step_checks

# R: rows, V: vocabulary


class PlainMinP:
    """Masks tokens whose probability is below min_p of the best one's."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters: tuple[str, ...] = ("min_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self.num_calls = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def is_active(self, params: SamplingParams) -> bool:
        return params.min_p > 0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        self.num_calls += 1
        least_R = torch.tensor([row.params.min_p for row in rows]).log()
        floor_R = logits_RV.max(1).values + least_R
        return logits_RV.masked_fill(logits_RV < floor_R[:, None], float("-inf"))


def changed(change: Any) -> type[PlainMinP]:
    """PlainMinP whose result is passed through change(step, before, after, rows)."""

    class Broken(PlainMinP):
        def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
            before = logits_RV.clone()
            return torch.as_tensor(change(self, before, super().apply(logits_RV, rows), rows))

    return Broken


class WrongName(PlainMinP):
    parameters = ("min_p", "minimum_p")


class AlwaysActive(PlainMinP):
    def is_active(self, params: SamplingParams) -> bool:
        return True


class NoEffect(PlainMinP):
    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        return logits_RV


class AlsoReadsTopK(PlainMinP):
    def is_active(self, params: SamplingParams) -> bool:
        return super().is_active(params) and params.top_k != 4


class MovesTheBest(PlainMinP):
    """Penalises the best token by more than the margin in one of 10,000 rows."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        out_RV = super().apply(logits_RV, rows)
        if len(rows) == 10_000:
            out_RV[77] = out_RV[77].flip(0)
        return out_RV


def appends(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    rows[0].output_token_ids.append(1)
    return after


def revives(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return torch.where((before == -float("inf")) & (before > -float("inf")).sum(1, keepdim=True).gt(1), -1e4, after)


def masks_flat_rows(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    flat = before.max(1).values == before.min(1).values
    return after.masked_fill(flat[:, None], -float("inf"))


def renormalises(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return after * 1.01 if len(rows) == 30 else after


def exponentiates(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    huge = (before.abs() > 1e29).any(1)
    return torch.where(huge[:, None] & (after > -float("inf")), after.exp().exp(), after)


def fades(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return after - 1.0 if step.num_calls == 4 and len(rows) == 5 else after


def centres(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return after - before.mean() if len(rows) == 12 else after


def doubles(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return after.double()


def takes_the_largest_min_p(
    step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]
) -> torch.Tensor:
    """One parameter for the whole batch."""
    floor_R = before.max(1).values + torch.tensor(max(row.params.min_p for row in rows)).log()
    return before.masked_fill(before < floor_R[:, None], -float("inf"))


def one_mask_a_request(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Rows behind drafts get what the first row of their request gets."""
    first = {(row.seed, row.lane): index for index, row in reversed(list(enumerate(rows)))}
    return after[[first[row.seed, row.lane] for row in rows]]


def averages(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A NaN anywhere reaches everyone."""
    return after + 0.0 * before.isnan().any() + (before * 0.0).mean().nan_to_num(1.0) * before.isnan().any()


def drops_the_last_id(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """As a kernel that takes the vocabulary for one id smaller."""
    is_best = before.argmax(1) == before.shape[1] - 1
    after[~is_best, -1] = -float("inf")
    return after


def drops_high_logits(step: Any, before: torch.Tensor, after: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A threshold on logits instead of probabilities."""
    is_best = before == before.max(1, keepdim=True).values
    return after.masked_fill((before > 12.0) & ~is_best, -float("inf"))


BROKEN: dict[str, type[PlainMinP]] = {
    "parameters_are_real_fields": WrongName,
    "neutral_params_are_inactive": AlwaysActive,
    "active_params_have_an_effect": NoEffect,
    "activity_depends_on_own_parameters": AlsoReadsTopK,
    "shape_and_dtype_stay": changed(doubles),
    "rows_do_not_mix": changed(centres),
    "calls_leave_no_trace": changed(fades),
    "rows_are_not_changed": changed(appends),
    "masked_stays_masked": changed(revives),
    "one_token_survives": changed(masks_flat_rows),
    "truncations_keep_the_rest": changed(renormalises),
    "large_logits_stay_numbers": changed(exponentiates),
    "argmax_is_invariant": MovesTheBest,
    "neighbours_params_do_not_matter": changed(takes_the_largest_min_p),
    "a_window_is_its_rows": changed(one_mask_a_request),
    "broken_rows_stay_alone": changed(averages),
    "tokens_have_no_names": changed(drops_the_last_id),
    "shifts_keep_the_set": changed(drops_high_logits),
}


def test_a_plain_step_passes() -> None:
    report = run_checks(logits_step_checks(PlainMinP))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in logits_step_checks(PlainMinP)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_fails_exactly_its_check(name: str) -> None:
    report = run_checks(logits_step_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


def test_the_argmax_check_is_made_only_when_declared() -> None:
    class Undeclared(PlainMinP):
        argmax_invariant = False

    assert "argmax_is_invariant" not in {check.name for check in logits_step_checks(Undeclared)}


class PlainMask(PlainMinP):
    """Bans every token but the allowed ones, whatever is left."""

    argmax_invariant = False
    hard_mask = True
    parameters = ("allowed_token_ids",)

    def is_active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        allowed = [list(row.params.allowed_token_ids or ()) for row in rows]
        banned_RV = torch.stack([torch.ones(logits_RV.shape[1]).index_fill(0, torch.tensor(ids), 0) for ids in allowed])
        return logits_RV.masked_fill(banned_RV.bool(), float("-inf"))


class FallsBack(PlainMask):
    """Rather a token outside the list than an unlikely one inside it."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        masked_RV = super().apply(logits_RV, rows)
        is_poor = masked_RV.max(1, keepdim=True).values < logits_RV.max(1, keepdim=True).values - 5.0
        return torch.where(is_poor & masked_RV.isfinite().any(1, keepdim=True), logits_RV, masked_RV)


def test_a_hard_mask_may_empty_a_row_but_not_look_at_it() -> None:
    assert run_checks(logits_step_checks(PlainMask)).ok
    names = {check.name for check in logits_step_checks(PlainMask)}
    assert "one_token_survives" not in names
    assert run_checks(logits_step_checks(FallsBack)).failed == ("hard_masks_ignore_logits",)
