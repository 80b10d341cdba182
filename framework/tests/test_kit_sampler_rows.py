"""The kit's checks of final rows are tested: a plain sampler passes, and for each a broken sampler fails only that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.sampler import FINAL_ROWS, NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import run_checks
from pluglm.testing.sampler import sampler_checks
from pluglm.testing.sampler_rows import final_row_checks
from pluglm.verification.randomness import uniform

# R: rows, V: vocabulary


class RowSampler:
    """Temperature, presence penalty and an inverse distribution function in float64; tells its rows."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        """Nothing to read."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({FINAL_ROWS}))

    def check(self, params: SamplingParams) -> str | None:
        known = {"temperature", "presence_penalty"}
        others = set(params.model_dump(exclude_defaults=True)) - known
        return f"{sorted(others)} are not known here" if others else None

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        return [self.one(self.shaped(row_V, row), row) for row_V, row in zip(logits_RV, rows, strict=True)]

    def one(self, row_V: np.ndarray, row: SampleRow) -> int:
        if row_V.max() == -np.inf:
            return NO_TOKEN
        if row.params.greedy:
            return int(row_V.argmax())
        running_V = np.exp(row_V - row_V.max()).cumsum()
        return int((running_V > uniform(row.seed, row.lane, row.position) * running_V[-1]).argmax())

    def shaped(self, logits_V: torch.Tensor, row: SampleRow) -> np.ndarray:
        row_V = logits_V.double().numpy().copy()
        row_V[list(set(row.output_token_ids))] -= row.params.presence_penalty
        return row_V if row.params.greedy else row_V / row.params.temperature

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        found = [self.final(self.shaped(row_V, row), row) for row_V, row in zip(logits_RV, rows, strict=True)]
        return torch.from_numpy(np.stack(found)).float()

    def final(self, row_V: np.ndarray, row: SampleRow) -> np.ndarray:
        if row_V.max() == -np.inf:
            return np.zeros_like(row_V)
        if row.params.greedy:
            return np.eye(len(row_V))[row_V.argmax()]
        weights_V = np.exp(row_V - row_V.max())
        return weights_V / weights_V.sum()


class NamesMaskedTokens(RowSampler):
    def final(self, row_V: np.ndarray, row: SampleRow) -> np.ndarray:
        found_V = super().final(row_V, row)
        return 0.99 * found_V + 0.01 / len(found_V) if row.params.temperature == 0.6 and found_V.any() else found_V


class SoftGreedy(RowSampler):
    """Tells the whole row of a greedy request, though it takes the best token."""

    def final(self, row_V: np.ndarray, row: SampleRow) -> np.ndarray:
        weights_V = np.exp(row_V - max(row_V.max(), -1e9))
        return weights_V / max(weights_V.sum(), 1e-9) if row.params.greedy else super().final(row_V, row)


class SharesAMean(RowSampler):
    """A batch of seven moves each row a little towards their mean."""

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        found_RV = super().final_rows(logits_RV, rows)
        if len(rows) != 7:
            return found_RV
        plain = [number for number, row in enumerate(rows) if not row.params.greedy]
        found_RV[plain] = 0.9 * found_RV[plain] + 0.1 * found_RV[plain].mean(0)
        return found_RV


class PenalisesTheBonusOnly(RowSampler):
    """Of a window; penalties on all of its rows would have it keep fewer drafts (SGLang issue 28242)."""

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        found_RV = super().final_rows(logits_RV, rows)
        if len(rows) == 5 and rows[0].params.presence_penalty:
            found_RV[0] = torch.softmax(logits_RV[0], -1)
        return found_RV


class TellsAnotherTemperature(RowSampler):
    def final(self, row_V: np.ndarray, row: SampleRow) -> np.ndarray:
        return super().final(row_V / 1.1 if row.params.temperature == 0.6 else row_V, row)


BROKEN: dict[str, type[RowSampler]] = {
    "final_rows_are_probabilities": NamesMaskedTokens,
    "greedy_rows_have_one_token": SoftGreedy,
    "final_rows_are_independent": SharesAMean,
    "windows_equal_single_rows": PenalisesTheBonusOnly,
    "draws_follow_the_final_rows": TellsAnotherTemperature,
}
SHAPES = ({}, {"temperature": 0.6}, {"presence_penalty": 0.8})


def takes(params: SamplingParams) -> bool:
    return RowSampler(ComponentConfig(), None).check(params) is None


def failed(cls: type[RowSampler], monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("pluglm.testing.sampler_rows.SHAPES", SHAPES)
    report = run_checks(final_row_checks(lambda width: cls(ComponentConfig(), None), takes))
    assert {outcome.name for outcome in report.outcomes} == set(BROKEN)
    return report.failed


def test_a_plain_sampler_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(RowSampler, monkeypatch) == ()
    monkeypatch.undo()
    report = run_checks(sampler_checks(RowSampler))
    assert report.ok, str(report)
    assert {outcome.name for outcome in report.outcomes} > set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_fails_exactly_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(BROKEN[name], monkeypatch) == (name,)
