"""The contract kit of logits steps: what a step may do to a row, and that its declarations are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks

# R: rows, V: vocabulary

VOCAB_SIZE = 17
INF = float("inf")
# a value away from neutral for every parameter that shapes logits
ACTIVE: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 4,
    "top_p": 0.6,
    "min_p": 0.2,
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.8,
    "presence_penalty": 0.9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The class under test, and params for which it must be active."""

    cls: type[Any]
    config: Any
    active: SamplingParams

    def build(self) -> LogitsStep:
        step: LogitsStep = self.cls(self.config, VOCAB_SIZE)
        return step

    def row(self, number: int = 0, **changes: Any) -> SampleRow:
        """Rows differ in what they have seen, so that a mix-up of rows shows."""
        output = [(number * 5 + i * i) % VOCAB_SIZE for i in range(1 + number % 4)]
        row = SampleRow(
            params=self.active,
            prompt_token_ids=(number % VOCAB_SIZE, 3),
            output_token_ids=output,
            seed=number,
            lane=0,
            position=len(output),
        )
        return replace(row, **changes)

    def rows(self, count: int) -> list[SampleRow]:
        return [self.row(number) for number in range(count)]


def logits_step_checks(cls: type[Any], config: Any = None, active: SamplingParams | None = None) -> Iterator[Check]:
    """Every check of a logits step. active: params that switch it on; by default each of `parameters` is set."""
    config = cls.Config() if config is None else config
    known = {name: ACTIVE[name] for name in cls.parameters if name in ACTIVE}
    subject = Subject(cls=cls, config=config, active=active or SamplingParams(**known))
    yield from common_checks("logits_step", cls, config, subject.build)
    for function in ALWAYS:
        yield make_check(function, subject)
    if cls.argmax_invariant:
        yield make_check(argmax_is_invariant, subject)


def apply(step: LogitsStep, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The step's result on a copy, as the step may work in place."""
    with torch.inference_mode():
        return step.apply(logits_RV.clone(), rows).clone()


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    """logits_RV float32 without ties."""
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


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
    logits_RV = random_rows(4000, 9)
    found = apply(subject.build(), logits_RV, subject.rows(4000))
    moved = int((found.argmax(1) != logits_RV.argmax(1)).sum())
    expect(moved == 0, "the most likely token of 4000 rows unchanged, as declared", f"{moved} changed")


ALWAYS = (
    parameters_are_real_fields,
    neutral_params_are_inactive,
    active_params_have_an_effect,
    activity_depends_on_own_parameters,
    shape_and_dtype_stay,
    rows_do_not_mix,
    calls_leave_no_trace,
    rows_are_not_changed,
    masked_stays_masked,
    one_token_survives,
    truncations_keep_the_rest,
    large_logits_stay_numbers,
)
