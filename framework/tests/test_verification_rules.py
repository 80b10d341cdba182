"""Batched verification equals the plain forms bit for bit, and both do what the papers say at the edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.testing.lossless_chains import Chain
from pluglm.testing.lossless_reach import block_reach, token_reach
from pluglm.testing.lossless_runs import Verifier, chance_kept, enumerate_chains
from pluglm.testing.lossless_tables import filtered_chains
from pluglm.verification import Verdict, Windows, block, reference, reproducible, siblings, token

# S: sequences, D: drafts of all of them, V: vocabulary

RULES: dict[str, Callable[[Windows], Verdict]] = {"reproducible": reproducible, "token": token, "block": block}
MOST = 1.0 - 2.0**-53


def random_rows(random: np.random.Generator, count: int, width: int, is_sparse: bool) -> torch.Tensor:
    rows = random.dirichlet(np.full(width, 0.7), count)
    if is_sparse:
        rows *= random.random(rows.shape) < 0.6
        rows[np.arange(count), random.integers(0, width, count)] += 0.1
    return torch.from_numpy(rows / rows.sum(1, keepdims=True)).float()


def random_windows(seed: int, num_sequences: int, width: int, is_drawn: bool, most: int = 5) -> Windows:
    """0 to `most` drafts each; rows with zeros where the seed is odd."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, most + 1, num_sequences)
    proposal_DV = random_rows(random, int(counts.sum()), width, seed % 2 == 1)
    return Windows(
        num_drafts=counts.tolist(),
        drafts_D=torch.multinomial(proposal_DV, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1),
        target_TV=random_rows(random, int(counts.sum()) + num_sequences, width, seed % 2 == 1),
        proposal_DV=proposal_DV if is_drawn else None,
        coins_D=torch.from_numpy(random.random(int(counts.sum()))),
        recover_S=torch.from_numpy(random.random(num_sequences)),
    )


def plain_runs(windows: Windows, rule: Callable[..., list[int]], parents: list[int] | None = None) -> list[list[int]]:
    runs = []
    for number, (start, count) in enumerate(zip(windows.first_draft_S.tolist(), windows.num_drafts, strict=True)):
        drafts = slice(start, start + count)
        rows = windows.target_TV[start + number : start + number + count + 1].double().numpy()
        third: Any = None if windows.proposal_DV is None else windows.proposal_DV[drafts].double().numpy()
        third = third if parents is None else parents[drafts]
        coins, recover = windows.coins_D[drafts].tolist(), float(windows.recover_S[number])
        runs.append(rule(rows, windows.drafts_D[drafts].tolist(), third, coins, recover))
    return runs


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("width", "num_sequences"), [(2, 300), (5, 300), (50, 200), (3000, 20)])
def test_batches_equal_the_plain_form(name: str, is_drawn: bool, width: int, num_sequences: int) -> None:
    for seed in (2, 3):
        windows = random_windows(seed, num_sequences, width, is_drawn)
        assert RULES[name](windows).runs(windows) == plain_runs(windows, getattr(reference, name))


@pytest.mark.parametrize("name", RULES)
def test_drafts_that_nothing_was_drawn_from_are_judged_alike(name: str) -> None:
    """q of 0 at the draft, with p of 0 and without: against the contract, and still no NaN."""
    windows = random_windows(11, 300, 4, is_drawn=True)
    others = torch.randint(0, 4, windows.drafts_D.shape, generator=torch.Generator().manual_seed(1))
    windows = replace(windows, drafts_D=others)
    assert (windows.proposal_of_drafts() == 0).any()
    assert RULES[name](windows).runs(windows) == plain_runs(windows, getattr(reference, name))


@pytest.mark.parametrize("width", [3, 6])
def test_trees_equal_the_plain_form(width: int) -> None:
    random = np.random.default_rng(4)
    for seed in (4, 5):
        windows = random_windows(seed, 300, width, is_drawn=False, most=7)
        parents = [int(random.integers(0, place + 1)) for count in windows.num_drafts for place in range(count)]
        assert siblings(windows, parents).runs(windows, parents) == plain_runs(windows, reference.siblings, parents)


def test_a_chain_is_a_tree_with_one_child_a_node() -> None:
    windows = random_windows(6, 300, 4, is_drawn=False)
    parents = [place for count in windows.num_drafts for place in range(count)]
    assert siblings(windows, parents).runs(windows, parents) == token(windows).runs(windows)


def test_reproducible_runs_are_what_plain_sampling_says() -> None:
    """Coin by coin, by numpy's own search, up to and with the first draw that is not the draft."""
    windows = random_windows(7, 300, 3, is_drawn=False)
    runs = reproducible(windows).runs(windows)
    for number, (start, count) in enumerate(zip(windows.first_draft_S.tolist(), windows.num_drafts, strict=True)):
        coins = [*windows.coins_D[start : start + count].tolist(), float(windows.recover_S[number])]
        running = windows.target_TV[start + number : start + number + count + 1].double().numpy().cumsum(1)
        said = [
            int(np.searchsorted(row, coin * row[-1], side="right")) for row, coin in zip(running, coins, strict=True)
        ]
        assert runs[number] == said[: len(runs[number])]
        drafts = windows.drafts_D[start : start + count].tolist()
        assert runs[number][:-1] == drafts[: len(runs[number]) - 1]
        assert len(runs[number]) > count or runs[number][-1] != drafts[len(runs[number]) - 1]


def one_window(p: list[list[float]], drafts: list[int], q: list[list[float]] | None, coin: float) -> Windows:
    return Windows(
        num_drafts=[len(drafts)],
        drafts_D=torch.tensor(drafts, dtype=torch.int64),
        target_TV=torch.tensor(p),
        proposal_DV=None if q is None else torch.tensor(q),
        coins_D=torch.full((len(drafts),), coin, dtype=torch.float64),
        recover_S=torch.tensor([0.5], dtype=torch.float64),
    )


@pytest.mark.parametrize("rule", [token, block])
def test_a_drafter_equal_to_the_target_is_never_refused(rule: Callable[[Windows], Verdict]) -> None:
    """Also by the largest coin; under block verification the chance of every prefix but the last is 0 / 0."""
    rows = [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]
    windows = one_window([*rows, [0.0, 1.0, 0.0]], [0, 2], rows, MOST)
    assert rule(windows).runs(windows) == [[0, 2, 1]]


@pytest.mark.parametrize("rule", [token, block])
def test_a_residual_that_rounding_empties_gives_way_to_the_target(rule: Callable[[Windows], Verdict]) -> None:
    """p is below q nowhere but by one float32 step at the draft, which is refused; nothing is left of (p - q)+."""
    q = [float(np.nextafter(np.float32(0.5), np.float32(1.0))), 0.5]
    windows = one_window([[0.5, 0.5], [1.0, 0.0]], [0], [q], MOST)
    assert rule(windows).num_kept_S.tolist() == [0]
    assert rule(windows).runs(windows) == [[1]]  # recover = 0.5 of [0.5, 0.5]


def test_a_fixed_draft_that_is_certain_is_kept() -> None:
    windows = one_window([[0.0, 1.0], [1.0, 0.0]], [1], None, MOST)
    assert token(windows).runs(windows) == [[1, 0]]


def test_block_verification_keeps_a_tiny_remainder() -> None:
    """r = 1 and S = 1.5e-16: S / (S + 1 - r) is 1, and would be 0.68 if S were added to 1 first."""
    windows = one_window([[1.0, 0.0], [1.5e-16, 0.5], [1.0, 0.0]], [0, 1], [[1.0, 0.0], [0.0, 1.0]], 0.999)
    assert block(windows).runs(windows) == [[0, 0]]


def test_block_verification_passes_a_prefix_of_0_over_0() -> None:
    """p = q up to the first draft, then a draft that is refused by rounding alone, with nothing left of (r p - q)+."""
    q = [float(np.nextafter(np.float32(0.5), np.float32(1.0))), 0.5]
    windows = one_window([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]], [1, 0], [[0.5, 0.5], q], MOST)
    assert block(windows).runs(windows) == [[1, 1]]


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_windows_without_drafts_take_the_target_row(name: str, is_drawn: bool) -> None:
    windows = random_windows(8, 50, 5, is_drawn, most=0)
    plain = [
        reference.pick(row.double().numpy(), float(u))
        for row, u in zip(windows.target_TV, windows.recover_S, strict=True)
    ]
    assert RULES[name](windows).runs(windows) == [[one] for one in plain]


def test_the_papers_example() -> None:
    """Sun et al., 2024: p = (1/3, 2/3), q = (2/3, 1/3), k = 2; 10/9 drafts are kept token-wise, 11/9 by block."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    chain = Chain(tuple(np.tile(p, (2**i, 1)) for i in range(3)), tuple(np.tile(q, (2**i, 1)) for i in range(2)))
    for rule, reach, expected in ((token, token_reach, 10 / 9), (block, block_reach, 11 / 9)):
        exact = enumerate_chains(Verifier(rule=rule, reach=reach), [chain])[0]
        assert exact.kept.sum() == pytest.approx(expected, abs=1e-6)


def test_block_verification_keeps_no_fewer_drafts() -> None:
    """The theorem of the paper, on every chain of the kit with V = 3 and k = 4."""
    chains = list(filtered_chains(3, 4).values())
    by_block, by_token = (
        chance_kept(Verifier(rule=rule, reach=reach), chains).sum(1)
        for rule, reach in ((block, block_reach), (token, token_reach))
    )
    assert (by_block >= by_token - 1e-12).all()
    assert (by_block > by_token + 1e-3).any()


def test_what_does_not_fit_is_refused() -> None:
    windows = random_windows(9, 4, 3, is_drawn=True)
    fields = {name: getattr(windows, name) for name in ("num_drafts", "drafts_D", "target_TV", "coins_D", "recover_S")}
    with pytest.raises(ValueError, match=r"coins_D is \(\d+,\) torch.float32, expected \(\d+,\) torch.float64"):
        Windows(**{**fields, "coins_D": windows.coins_D.float()}, proposal_DV=None)
    with pytest.raises(ValueError, match="target_TV is"):
        Windows(**{**fields, "target_TV": windows.target_TV[1:]}, proposal_DV=None)
    with pytest.raises(ValueError, match="num_drafts has -1"):
        Windows(**{**fields, "num_drafts": [-1, 2]}, proposal_DV=None)
    with pytest.raises(ValueError, match="pass proposal_DV=None"):
        siblings(windows, [0] * len(windows.drafts_D))
    two = one_window([[0.5, 0.5]] * 3, [0, 1], None, 0.5)
    with pytest.raises(ValueError, match="parents has 1 entries for 2 drafts"):
        siblings(two, [0])
    with pytest.raises(ValueError, match=r"node 0 has parent 1; it must be 0\.\.0"):
        siblings(two, [1, 0])
