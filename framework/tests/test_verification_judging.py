"""The glue between engine and rules: which windows are judged, with what coins, and where a run is cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from pluglm.verification import Windows, reference, reproducible
from pluglm.verification.judging import Run, judged_rows, verify
from pluglm.verification.randomness import Purpose, uniform, window_uniforms

# k: drafts of one window, V: vocabulary

WIDTH = 5
REFERENCES = {"token": reference.token, "block": reference.block}


class Window(NamedTuple):
    drafts: tuple[int, ...]
    proposal_rows: torch.Tensor | None
    key: tuple[int, int, int]


def rows_of(generator: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(generator.dirichlet(np.ones(WIDTH), count)).float()


def some_windows(seed: int) -> tuple[list[Window], torch.Tensor]:
    """Windows of 0 to 3 drafts, every third without rows, one with more rows than drafts; and all final rows."""
    generator = np.random.default_rng(seed)
    windows = []
    for number in range(12):
        count = number % 4
        rows_kV = None if number % 3 == 0 else rows_of(generator, count + number % 2)
        drafts = tuple(generator.integers(0, WIDTH, count).tolist())
        windows.append(Window(drafts, rows_kV, (seed, number, 40 + number)))
    return windows, rows_of(generator, sum(len(one.drafts) + 1 for one in windows))


def run_by_reference(rule: str, window: Window, target_TV: torch.Tensor) -> list[int]:
    """The plain form of the rule, with the coins that the docstring states."""
    seed, lane, start = window.key
    count = len(window.drafts)
    coins = [uniform(seed, lane, start + place, Purpose.ACCEPT, start) for place in range(count)]
    assert list(window_uniforms(seed, lane, start, count, Purpose.ACCEPT)) == coins
    assert window.proposal_rows is not None
    q_kV = window.proposal_rows[:count].double().numpy()
    recover = uniform(seed, lane, start, Purpose.RECOVER)
    return REFERENCES[rule](target_TV.double().numpy(), window.drafts, q_kV, coins, recover)


@pytest.mark.parametrize("rule", REFERENCES)
@pytest.mark.parametrize("seed", range(5))
def test_runs_are_those_of_the_plain_rules(rule: str, seed: int) -> None:
    windows, target_TV = some_windows(seed)
    judged, row = judged_rows(rule, windows), 0
    drawn = {number: number % WIDTH for number in range(len(target_TV)) if number not in judged}
    runs = verify(rule, windows, drawn, {number: target_TV[number] for number in judged})
    for window, run in zip(windows, runs, strict=True):
        span = range(row, row + len(window.drafts) + 1)
        if window.drafts and window.proposal_rows is not None:
            assert set(span) <= judged
            expected = run_by_reference(rule, window, target_TV[span.start : span.stop])
        else:
            assert not set(span) & judged
            matches = [*(drawn[one] == draft for one, draft in zip(span, window.drafts, strict=False)), False]
            expected = [drawn[one] for one in span][: matches.index(False) + 1]
        assert run == Run(span.start, expected, len(expected) - 1)
        row = span.stop


@pytest.mark.parametrize("seed", range(40))
def test_comparing_draws_is_the_rule_reproducible(seed: int) -> None:
    """Both on the same rows and coins: draws made beforehand, as the sampler makes them, and the rule that draws."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 5, 12).tolist()
    target_TV = torch.from_numpy(generator.dirichlet(np.full(WIDTH, 0.3), sum(counts) + len(counts))).float()
    coins_T, first = generator.random(len(target_TV)).clip(1e-9), np.cumsum([0, *(count + 1 for count in counts)])
    drawn = [reference.pick(row_V, coin) for row_V, coin in zip(target_TV.double().numpy(), coins_T, strict=True)]
    drafted, expected = list[Window](), list[Run]()
    for number, (start, count) in enumerate(zip(first.tolist(), counts, strict=False)):
        is_drawn = generator.random(count) < 0.8
        drafts = np.where(is_drawn, drawn[start : start + count], generator.integers(0, WIDTH, count)).tolist()
        drafted.append(Window(tuple(drafts), None, (seed, number, 0)))
        *coins, recover = coins_T[start : start + count + 1].tolist()
        span_TV = target_TV[start : start + count + 1].double().numpy()
        run = reference.reproducible(span_TV, drafts, None, coins, recover)
        expected.append(Run(start, run, len(run) - 1))
    is_bonus_T = np.isin(np.arange(len(target_TV)), first[1:] - 1)
    windows = Windows(
        num_drafts=counts,
        drafts_D=torch.tensor([draft for one in drafted for draft in one.drafts]),
        target_TV=target_TV,
        proposal_DV=None,
        coins_D=torch.from_numpy(coins_T[~is_bonus_T]),
        recover_S=torch.from_numpy(coins_T[is_bonus_T]),
    )
    assert reproducible(windows).runs(windows) == [run.token_ids for run in expected]
    assert verify("reproducible", drafted, dict(enumerate(drawn)), {}) == expected


def test_nothing_is_judged_under_reproducible() -> None:
    windows, target_TV = some_windows(0)
    assert judged_rows("reproducible", windows) == set()
    runs = verify("reproducible", windows, dict.fromkeys(range(len(target_TV)), 0), {})
    assert all(run.token_ids[-1] == 0 for run in runs)


@pytest.mark.parametrize("rule", REFERENCES)
@pytest.mark.parametrize("broken", range(4))
def test_a_run_ends_before_a_row_without_a_token(rule: str, broken: int) -> None:
    """Wherever it is: what comes before it is what the rule says with any row in its place."""
    for seed in range(60):
        generator = np.random.default_rng(seed)
        window = Window((1, 2, 3), rows_of(generator, 3), (seed, 0, 9))
        target_TV = 0.5 * rows_of(generator, 4) + 0.5 * torch.eye(WIDTH)[[1, 2, 3, 4]]
        whole_TV = target_TV.clone()
        whole_TV[broken] = 1 / WIDTH
        target_TV[broken] = 0.0
        final = {row: target_TV[row] for row in range(4) if row != broken or seed % 2}
        (run,) = verify(rule, [window], {}, final)
        expected = run_by_reference(rule, window, whole_TV)
        if len(expected) > broken:
            assert run == Run(0, expected[:broken], broken)
            assert run.token_ids == list(window.drafts[:broken])
        else:
            assert run == Run(0, expected, len(expected) - 1)


def test_a_draw_is_missing() -> None:
    """reproducible: the run ends before the row, and all of it are drafts."""
    window = Window((1, 2), None, (0, 0, 0))
    assert verify("reproducible", [window], {0: 1}, {}) == [Run(0, [1], 1)]
    assert verify("reproducible", [window], {0: 1, 1: 2}, {}) == [Run(0, [1, 2], 2)]
    assert verify("reproducible", [window], {0: 4, 2: 1}, {}) == [Run(0, [4], 0)]
    assert verify("reproducible", [window], {}, {}) == [Run(0, [], 0)]


@pytest.mark.parametrize("rule", REFERENCES)
def test_no_final_rows_at_all_give_no_tokens(rule: str) -> None:
    """The sampler failed, which ended these requests."""
    window = Window((1,), torch.full((1, WIDTH), 1 / WIDTH), (0, 0, 0))
    assert verify(rule, [window], {}, {}) == [Run(0, [], 0)]
