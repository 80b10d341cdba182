"""The contract kit of logits steps: what a step may do to a row, and that its declarations are true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.logits_step_laws import LAWS, hard_masks_ignore_logits
from pluglm.testing.logits_step_subject import ACTIVE, INF, VOCAB_SIZE, Subject, apply, random_rows

# R: rows, V: vocabulary

NUM_ARGMAX = 10_000


def logits_step_checks(cls: type[Any], config: Any = None, active: SamplingParams | None = None) -> Iterator[Check]:
    """Every check of a logits step. active: params that switch it on; by default each of `parameters` is set.

    A class with `hard_mask = True` may leave a row without a token, and is held to the logits it must not look at.
    """
    config = cls.Config() if config is None else config
    known = {name: ACTIVE[name] for name in cls.parameters if name in ACTIVE}
    subject = Subject(cls=cls, config=config, active=active or SamplingParams(**known))
    yield from common_checks("logits_step", cls, config, subject.build)
    survival = hard_masks_ignore_logits if getattr(cls, "hard_mask", False) else one_token_survives
    for function in (*ALWAYS, *LAWS, survival):
        yield make_check(function, subject)
    if cls.argmax_invariant:
        yield make_check(argmax_is_invariant, subject)


def parameters_are_real_fields(subject: Subject) -> None:
    unknown = [name for name in subject.cls.parameters if name not in SamplingParams.model_fields]
    expect(not unknown, "names of SamplingParams fields in `parameters`", unknown)


def neutral_params_are_inactive(subject: Subject) -> None:
    """The defaults of SamplingParams are the values that switch a parameter off."""
    if subject.cls.parameters:
        active = subject.build().is_active(SamplingParams())
        expect(active is False, "is_active False for default params", active)


def active_params_have_an_effect(subject: Subject) -> None:
    step, logits_RV = subject.build(), random_rows(8, 1)
    expect(step.is_active(subject.active) is True, f"is_active True for {subject.active!r}", False)
    expect(not torch.equal(apply(step, logits_RV, subject.rows(8)), logits_RV), "changed logits", "the same bits")


def activity_depends_on_own_parameters(subject: Subject) -> None:
    """Fields that are not in `parameters` change neither is_active nor the result."""
    step, logits_RV = subject.build(), random_rows(6, 2)
    before = apply(step, logits_RV, subject.rows(6))
    for name, value in ACTIVE.items():
        if name in subject.cls.parameters:
            continue
        other = subject.active.model_copy(update={name: value})
        expect(step.is_active(other) is True, f"is_active as before when {name} = {value}", step.is_active(other))
        found = apply(step, logits_RV, [replace(row, params=other) for row in subject.rows(6)])
        expect(torch.equal(found, before), f"the same result when {name} = {value}", (found - before).abs().max())


def shape_and_dtype_stay(subject: Subject) -> None:
    for count in (1, 5):
        found = apply(subject.build(), random_rows(count), subject.rows(count))
        expect(found.shape == (count, VOCAB_SIZE), f"shape {(count, VOCAB_SIZE)}", tuple(found.shape))
        expect(found.dtype == torch.float32, "float32", found.dtype)


def calls_leave_no_trace(subject: Subject) -> None:
    used, logits_RV, rows = subject.build(), random_rows(5, 4), subject.rows(5)
    fresh = apply(subject.build(), logits_RV, rows)
    for number in range(3):
        apply(used, random_rows(4, 90 + number), subject.rows(4))
    expect(torch.equal(apply(used, logits_RV, rows), fresh), "the result of an unused step", "another one")


def rows_are_not_changed(subject: Subject) -> None:
    rows = subject.rows(6)
    apply(subject.build(), random_rows(6, 5), rows)
    expect(rows == subject.rows(6), "rows and their token lists as given", rows)


def masked_stays_masked(subject: Subject) -> None:
    logits_RV = random_rows(20, 6)
    logits_RV[torch.rand(20, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) < 0.5] = -INF
    logits_RV[:, 3] = 1.0
    found = apply(subject.build(), logits_RV, subject.rows(20))
    revived = int((found[logits_RV == -INF] != -INF).sum())
    expect(revived == 0, "-inf to stay -inf", f"{revived} masked tokens with another logit")


def one_token_survives(subject: Subject) -> None:
    """Of rows that are peaked, flat, or masked but for one token."""
    logits_RV = torch.zeros(3, VOCAB_SIZE)
    logits_RV[0, 5] = 200.0
    logits_RV[2] = -INF
    logits_RV[2, 9] = -40.0
    found = apply(subject.build(), logits_RV, subject.rows(3))
    survivors = (found > -INF).sum(1).tolist()
    expect(min(survivors) >= 1, "at least one finite logit a row", f"{survivors} survivors")


def truncations_keep_the_rest(subject: Subject) -> None:
    """Rows in which the step masks a token: the differences of the others stay."""
    logits_RV = random_rows(30, 7)
    found = apply(subject.build(), logits_RV, subject.rows(30))
    for before, after in zip(logits_RV, found, strict=True):
        kept = after > -INF
        if bool(kept.all()) or not bool(kept.any()):
            continue
        shift = (after - before)[kept]
        spread = float(shift.max() - shift.min())
        expect(spread <= 1e-5, "unchanged differences between the tokens that a truncation keeps", f"{spread:.3g}")


def large_logits_stay_numbers(subject: Subject) -> None:
    logits_RV = random_rows(4, 8)
    logits_RV[0] *= 1e30
    logits_RV[1, 2], logits_RV[1, 3] = 3.0e38, -3.0e38
    logits_RV[2] += 5e4
    found = apply(subject.build(), logits_RV, subject.rows(4))
    bad = int((found.isnan() | (found == INF)).sum())
    expect(bad == 0, "no NaN and no +inf", f"{bad} of them")


def argmax_is_invariant(subject: Subject) -> None:
    """Declared, so that greedy rows may skip the step."""
    logits_RV = random_rows(NUM_ARGMAX, 9)
    found = apply(subject.build(), logits_RV, subject.rows(NUM_ARGMAX))
    moved = int((found.argmax(1) != logits_RV.argmax(1)).sum())
    expect(moved == 0, f"the most likely token of {NUM_ARGMAX} rows unchanged, as declared", f"{moved} changed")


ALWAYS = (
    parameters_are_real_fields,
    neutral_params_are_inactive,
    active_params_have_an_effect,
    activity_depends_on_own_parameters,
    shape_and_dtype_stay,
    calls_leave_no_trace,
    rows_are_not_changed,
    masked_stays_masked,
    truncations_keep_the_rest,
    large_logits_stay_numbers,
)
