"""The kit of samplers is tested: a plain sampler passes, and for every check one broken sampler fails only that."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.sampler import sampler_checks

# R: rows, V: vocabulary

GREEDY_NAMES = frozenset(
    {
        "greedy_takes_the_lowest_best_id",
        "greedy_draws_nothing",
        "gives_one_id_a_row",
        "same_key_same_token",
        "rows_are_independent",
        "earlier_calls_leave_no_trace",
        "global_generators_are_left_alone",
        "rows_are_not_changed",
        "a_row_without_a_token_gives_no_token_alone",
        "refusals_are_one_line",
        "final_rows_are_declared",
    }
)


def mix(x_R: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x_R = (x_R ^ (x_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_R = (x_R ^ (x_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_R ^ (x_R >> np.uint64(31))


class InverseSampler:
    """Inverse distribution function in float64 over a hash of the key. Methods are what the fixtures break."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.num_calls = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def check(self, params: SamplingParams) -> str | None:
        return "top_k is not known here" if params.top_k > 0 else None

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        self.num_calls += 1
        logits = self.shaped(logits_RV.double().numpy(), rows)
        is_empty = logits.max(1) == -np.inf
        weights = np.exp(logits - np.where(is_empty, 0.0, logits.max(1))[:, None])
        running = weights.cumsum(1)
        drawn = (running > self.uniform(rows)[:, None] * running[:, -1:]).argmax(1)
        best = self.best(logits_RV)
        found = [int(b if row.params.greedy else d) for row, b, d in zip(rows, best, drawn, strict=True)]
        return self.without(found, is_empty)

    def without(self, found: list[int], is_empty: Any) -> list[int]:
        return [NO_TOKEN if empty else token for token, empty in zip(found, is_empty.tolist(), strict=True)]

    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        temperatures = np.array([1.0 if row.params.greedy else row.params.temperature for row in rows])
        return logits / temperatures[:, None]

    def uniform(self, rows: Sequence[SampleRow]) -> Any:
        """In [0, 1), 53 bits."""
        seeds, lanes, positions = (np.array(one, dtype=np.uint64) for one in self.keys(rows))
        golden = np.uint64(0x9E3779B97F4A7C15)
        bits = mix(mix(mix(seeds + golden) + lanes * golden + golden) + positions * golden + golden)
        return (bits >> np.uint64(11)).astype(np.float64) / 2.0**53

    def keys(self, rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
        return [row.seed for row in rows], [row.lane for row in rows], [row.position for row in rows]

    def best(self, logits_RV: torch.Tensor) -> list[int]:
        return [int(one) for one in logits_RV.numpy().argmax(1)]


class LastOfTies(InverseSampler):
    def best(self, logits_RV: torch.Tensor) -> list[int]:
        return [row.shape[0] - 1 - int(row.flip(0).numpy().argmax()) for row in logits_RV]


class NoisyGreedy(InverseSampler):
    """A Gumbel trick with a tiny temperature in place of argmax: right except for near ties."""

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        if logits_RV.shape[1] == 5 and all(row.params.greedy for row in rows):
            logits_RV[:, 0] += torch.as_tensor(self.uniform(rows) * 1e-5, dtype=torch.float32)
        return super().sample(logits_RV, rows)


class TensorIds(InverseSampler):
    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        found = super().sample(logits_RV, rows)
        return [torch.tensor(one) for one in found] if len(rows) == 3 else found  # type: ignore[misc]


class KeyedByObject(InverseSampler):
    """Large seeds are mixed with the number of the sampler in this process."""

    objects: list[int] = []  # noqa: RUF012 - the shared state is what is wrong with it

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.objects.append(1)
        self.shift = len(self.objects) % 2 * 0.37

    def uniform(self, rows: Sequence[SampleRow]) -> Any:
        found = super().uniform(rows)
        return (found + self.shift) % 1.0 if rows[0].seed == 2**64 - 1 else found


class KeyedByRow(InverseSampler):
    def uniform(self, rows: Sequence[SampleRow]) -> Any:
        found = super().uniform(rows)
        return (found + np.arange(30) * 0.1) % 1.0 if len(rows) == 30 else found


class CountsCalls(InverseSampler):
    def uniform(self, rows: Sequence[SampleRow]) -> Any:
        found = super().uniform(rows)
        return (found + 0.37) % 1.0 if self.num_calls == 8 and len(rows) == 20 else found


class AdvancesTorch(InverseSampler):
    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        torch.rand(1)
        random.random()
        return super().sample(logits_RV, rows)


class AppendsItsToken(InverseSampler):
    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        found = super().sample(logits_RV, rows)
        rows[0].output_token_ids.append(found[0])
        return found


class DropsTheBatch(InverseSampler):
    def without(self, found: list[int], is_empty: Any) -> list[int]:
        return [NO_TOKEN] * len(found) if is_empty.any() else found


class RefusesInTwoLines(InverseSampler):
    def check(self, params: SamplingParams) -> str | None:
        return "top_k is not known here\nsorry" if params.top_k > 0 else None


class DrawsMasked(InverseSampler):
    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        num_masked = np.isinf(logits).sum(1)
        is_nearly_empty = (num_masked > 14) & (num_masked < 17)
        return np.where(is_nearly_empty[:, None], np.maximum(logits, -8.0), super().shaped(logits, rows))


class Overflows(InverseSampler):
    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        found = super().shaped(logits, rows)
        return np.minimum(found, 0.0) if logits.max() > 1e4 else found


class TooWarm(InverseSampler):
    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        return super().shaped(logits, rows) / 1.1 if rows[0].seed == 11 else super().shaped(logits, rows)


class MultipliesByTemperature(InverseSampler):
    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        temperatures = np.array([1.0 if row.params.greedy else row.params.temperature for row in rows])
        return logits * temperatures[:, None]


class OneLane(InverseSampler):
    def keys(self, rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
        seeds, lanes, positions = super().keys(rows)
        return seeds, [0] * len(lanes), positions


class ReusesPositions(InverseSampler):
    """Two neighbouring positions of seed 22 share a draw."""

    def keys(self, rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
        seeds, lanes, positions = super().keys(rows)
        return seeds, lanes, [p - p % 2 if seed == 22 else p for seed, p in zip(seeds, positions, strict=True)]


class DropsTheHighBit(InverseSampler):
    def keys(self, rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
        seeds, lanes, positions = super().keys(rows)
        return [seed % 2**63 for seed in seeds], lanes, positions


class HidesItsFinalRows(InverseSampler):
    """It has the method and does not say so; see test_kit_sampler_rows.py for those that say so."""

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        return logits_RV.softmax(-1)


BROKEN: dict[str, type[InverseSampler]] = {
    "greedy_takes_the_lowest_best_id": LastOfTies,
    "greedy_draws_nothing": NoisyGreedy,
    "gives_one_id_a_row": TensorIds,
    "same_key_same_token": KeyedByObject,
    "rows_are_independent": KeyedByRow,
    "earlier_calls_leave_no_trace": CountsCalls,
    "global_generators_are_left_alone": AdvancesTorch,
    "rows_are_not_changed": AppendsItsToken,
    "a_row_without_a_token_gives_no_token_alone": DropsTheBatch,
    "refusals_are_one_line": RefusesInTwoLines,
    "masked_tokens_are_never_drawn": DrawsMasked,
    "large_logits_do_not_overflow": Overflows,
    "draws_follow_the_softmax": TooWarm,
    "temperature_divides_the_logits": MultipliesByTemperature,
    "lanes_are_independent": OneLane,
    "positions_are_independent": ReusesPositions,
    "seeds_are_independent": DropsTheHighBit,
    "final_rows_are_declared": HidesItsFinalRows,
}


class GreedyOnly(InverseSampler):
    def check(self, params: SamplingParams) -> str | None:
        return None if params.greedy else "this sampler is greedy only"


def test_a_plain_sampler_passes() -> None:
    report = run_checks(sampler_checks(InverseSampler))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in sampler_checks(InverseSampler)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_fails_exactly_its_check(name: str) -> None:
    report = run_checks(sampler_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


class Early(InverseSampler):
    @classmethod
    def check_early(cls, config: ComponentConfig, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        return "top_k is not known here" if params.top_k > 0 else None


class RefusesTooMuchEarly(Early):
    @classmethod
    def check_early(cls, config: ComponentConfig, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        return None if params.greedy else "this sampler is greedy only"


class RefusesEarlyInTwoLines(Early):
    @classmethod
    def check_early(cls, config: ComponentConfig, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        return "top_k is not known here\nsorry" if params.top_k > 0 else None


def test_what_a_sampler_says_early_holds_later() -> None:
    report = run_checks(sampler_checks(Early))
    assert report.ok, str(report)
    assert {outcome.name for outcome in report.outcomes} == COMMON | set(BROKEN) | {"early_refusals_hold_later"}
    for broken in (RefusesTooMuchEarly, RefusesEarlyInTwoLines):
        report = run_checks(sampler_checks(broken))
        assert report.failed == ("early_refusals_hold_later",), str(report)


class OneTemperature(InverseSampler):
    def check(self, params: SamplingParams) -> str | None:
        return None if params.temperature in (0.0, 1.0) else "this sampler knows no temperature"

    def shaped(self, logits: Any, rows: Sequence[SampleRow]) -> Any:
        return logits


def test_a_sampler_that_refuses_other_temperatures_is_not_asked_for_them() -> None:
    report = run_checks(sampler_checks(OneTemperature))
    assert report.ok, str(report)
    assert {outcome.name for outcome in report.outcomes} == COMMON | set(BROKEN) - {"temperature_divides_the_logits"}


def test_a_sampler_that_refuses_temperature_gets_the_greedy_checks_only() -> None:
    report = run_checks(sampler_checks(GreedyOnly))
    assert report.ok, str(report)
    assert {outcome.name for outcome in report.outcomes} == COMMON | GREEDY_NAMES
