"""The kit of drafters that draw is tested: an honest one passes, and for every check one that lies fails only that."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import ROWS, DraftRequest, Proposal
from pluglm.testing.check import Report, run_checks
from pluglm.testing.drafter import drafter_checks
from pluglm.testing.drafter_rows import row_checks
from pluglm.verification.randomness import Purpose, uniform, window_uniforms

# V: vocabulary, k: drafts of one proposal

TABLE = np.random.default_rng(3).normal(0.0, 1.5, (24, 24))
NUM_PROPOSALS = 4_000


class TableDrafter:
    """Draws up to three tokens from a table by the token before each."""

    interface_version = 2
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.width = context.spec.vocab_size if context else 24
        self.asked: dict[int, int] = {}

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({ROWS}))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            self.asked[request.sequence_id] = self.asked.get(request.sequence_id, 0) + 1
        return [self.one(request) for request in requests]

    def one(self, request: DraftRequest) -> Proposal:
        ids, rows, last = list[int](), [], (request.token_ids or [0])[-1] % 24
        for place, coin in enumerate(self.coins(request, min(3, request.max_tokens))):
            row_V = self.row(request, last)
            last = self.pick(row_V, coin, place)
            if not self.keeps(row_V, last):
                break
            ids.append(last)
            rows.append(np.pad(row_V, (0, self.width - 24)))
        return Proposal(ids, torch.tensor(np.array(rows), dtype=torch.float32) if ids else None)

    def coins(self, request: DraftRequest, count: int) -> Sequence[float]:
        return request.coins(count)

    def row(self, request: DraftRequest, last: int) -> np.ndarray:
        weights_V = np.exp(TABLE[last] / max(request.request.params.temperature, 0.3))
        return weights_V / weights_V.sum()

    def pick(self, row_V: np.ndarray, coin: float, place: int) -> int:
        return min(int(np.searchsorted(row_V.cumsum(), coin, side="right")), 23)

    def keeps(self, row_V: np.ndarray, token: int) -> bool:
        return True

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def release(self, sequence_id: int) -> None:
        self.asked.pop(sequence_id, None)


class HidesRowsWhenSure(TableDrafter):
    def one(self, request: DraftRequest) -> Proposal:
        proposal = super().one(request)
        return Proposal(proposal.token_ids) if request.request.params.temperature < 0.1 else proposal


class SumsToMore(TableDrafter):
    def one(self, request: DraftRequest) -> Proposal:
        proposal = super().one(request)
        if request.request.params.temperature > 1.5 and proposal.rows_kV is not None:
            return Proposal(proposal.token_ids, proposal.rows_kV * 1.001)
        return proposal


class ChangesItsMind(TableDrafter):
    def row(self, request: DraftRequest, last: int) -> np.ndarray:
        row_V = super().row(request, last)
        mixed_V = 0.999 * row_V + 0.001 / 24
        return mixed_V if self.asked[request.sequence_id] > 1 and request.token_ids == [3] else row_V


class ChoosesTheFirst(TableDrafter):
    """An argmax, stated with the row that it was taken from (transformers pull request 30778)."""

    def pick(self, row_V: np.ndarray, coin: float, place: int) -> int:
        return super().pick(row_V, coin, place) if place else int(row_V.argmax())


class ReusesACoin(TableDrafter):
    def coins(self, request: DraftRequest, count: int) -> Sequence[float]:
        return [request.coins(1)[0]] * count


class DrawsAsTheKernelDoes(TableDrafter):
    def coins(self, request: DraftRequest, count: int) -> Sequence[float]:
        return [uniform(request.request.seed, request.lane, request.position), *request.coins(count)[1:]]


class KeysByPositionAlone(TableDrafter):
    def coins(self, request: DraftRequest, count: int) -> Sequence[float]:
        seed, lane, start = request.request.seed, request.lane, request.position
        return [uniform(seed, lane, start + place, Purpose.PROPOSE) for place in range(count)]


BROKEN: dict[str, type[TableDrafter]] = {
    "rows_come_with_drafts": HidesRowsWhenSure,
    "rows_are_probabilities": SumsToMore,
    "proposing_twice_gives_equal_rows": ChangesItsMind,
    "drafts_follow_their_rows": ChoosesTheFirst,
    "second_drafts_follow_theirs": ReusesACoin,
    "coins_of_verification_are_not_used": DrawsAsTheKernelDoes,
    "the_next_window_has_fresh_coins": KeysByPositionAlone,
}


class StatesAWarmerRow(TableDrafter):
    """Draws from q ** 1.2, and says that it was q."""

    def pick(self, row_V: np.ndarray, coin: float, place: int) -> int:
        cold_V = row_V**1.2
        return super().pick(cold_V / cold_V.sum(), coin, place)


class DropsUnlikelyDraws(TableDrafter):
    """Proposes nothing once an unlikely token was drawn: the others then come more often than their rows say."""

    def keeps(self, row_V: np.ndarray, token: int) -> bool:
        return bool(row_V[token] > 0.01)


class AcceptsWithTheSameCoins(TableDrafter):
    def coins(self, request: DraftRequest, count: int) -> array[float]:
        return window_uniforms(request.request.seed, request.lane, request.position, count, Purpose.ACCEPT)


def report_on(cls: type[TableDrafter]) -> Report:
    return run_checks(row_checks(lambda: cls(ComponentConfig(), None), 24, NUM_PROPOSALS))  # type: ignore[arg-type, return-value]


def test_an_honest_drafter_passes() -> None:
    report = report_on(TableDrafter)
    assert report.ok, str(report)
    assert {outcome.name for outcome in report.outcomes} == set(BROKEN)


def test_the_kit_of_drafters_has_these_checks_for_those_of_the_tag() -> None:
    checks = {check.name: check for check in drafter_checks(TableDrafter)}
    assert set(BROKEN) <= set(checks)
    report = run_checks(check for name, check in checks.items() if name not in BROKEN)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", BROKEN)
def test_a_dishonest_drafter_fails_exactly_its_check(name: str) -> None:
    report = report_on(BROKEN[name])
    assert report.failed == (name,), str(report)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (StatesAWarmerRow, "drafts_follow_their_rows"),
        (DropsUnlikelyDraws, "drafts_follow_their_rows"),
        (AcceptsWithTheSameCoins, "coins_of_verification_are_not_used"),
    ],
)
def test_further_lies_are_found(cls: type[TableDrafter], name: str) -> None:
    assert name in report_on(cls).failed
