"""The kit of verification is tested: right rules pass, and wrong ones seen in public engines fail at the same size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pluglm.testing.check import run_checks
from pluglm.testing.lossless import DELTA, NUM_WINDOWS, lossless_checks
from pluglm.testing.lossless_boxes import Floats
from pluglm.testing.lossless_chains import most_likely
from pluglm.testing.lossless_reach import block_reach, fixed_reach, token_reach
from pluglm.testing.lossless_runs import Verifier, enumerate_chains
from pluglm.testing.lossless_tables import searched_chain
from pluglm.testing.lossless_trees import tree_checks
from pluglm.verification import TreeVerdict, Verdict, Windows, block, reproducible, siblings, token
from pluglm.verification.drawing import draw_last, inverse_cdf

# S: sequences, D: drafts of all of them, N: rows, V: vocabulary

RIGHT = {
    "token": Verifier(rule=token, reach=token_reach),
    "block": Verifier(rule=block, reach=block_reach),
    "reproducible": Verifier(rule=reproducible, reach=fixed_reach, shows_rows=False),
    "reproducible, greedy drafts": Verifier(
        rule=reproducible, reach=fixed_reach, shows_rows=False, proposes=most_likely
    ),
    "token, greedy drafts": Verifier(rule=token, reach=fixed_reach, shows_rows=False, proposes=most_likely),
}


def from_target(windows: Windows, num_kept_S: torch.Tensor) -> torch.Tensor:
    return inverse_cdf(windows.target_TV[windows.first_row_S + num_kept_S], windows.recover_S)


def recovers_from_the_target(windows: Windows) -> Verdict:
    num_kept_S = token(windows).num_kept_S
    return Verdict(num_kept_S, from_target(windows, num_kept_S))


def accepts_by_the_target_alone(windows: Windows) -> Verdict:
    num_kept_S = windows.count_leading(windows.coins_D < windows.target_of_drafts())
    return Verdict(num_kept_S, draw_last(windows, num_kept_S))


def takes_off_the_draft_alone(windows: Windows) -> Verdict:
    """A one-hot residual behind soft acceptance; p - q(x) at x alone is the same, since only p < q is refused."""
    num_kept_S = token(windows).num_kept_S
    return Verdict(num_kept_S, draw_last(replace(windows, proposal_DV=None), num_kept_S))


def block_with_a_token_residual(windows: Windows) -> Verdict:
    num_kept_S = block(windows).num_kept_S
    return Verdict(num_kept_S, draw_last(windows, num_kept_S))


def typical_acceptance(windows: Windows) -> Verdict:
    """Medusa's: keep what is likely enough for the row's entropy."""
    rows_DV = windows.target_TV[windows.row_D].double()
    entropy_D = -(rows_DV * rows_DV.clamp(min=1e-300).log()).sum(-1)
    is_kept_D = windows.target_of_drafts() >= (0.3**0.5 * (-entropy_D).exp()).clamp(max=0.3)
    num_kept_S = windows.count_leading(is_kept_D)
    return Verdict(num_kept_S, from_target(windows, num_kept_S))


def recovers_with_the_accept_coin(windows: Windows) -> Verdict:
    num_kept_S = token(windows).num_kept_S
    if not len(windows.coins_D):
        return token(windows)
    refused_S = (windows.first_draft_S + num_kept_S).clamp(max=len(windows.coins_D) - 1)
    coin_S = windows.coins_D[refused_S].where(num_kept_S < windows.num_drafts_S, windows.recover_S)
    return Verdict(num_kept_S, draw_last(replace(windows, recover_S=coin_S), num_kept_S))


def likely_ones(rows_NV: Floats) -> Floats:
    """Ids are drawn and then dropped if they are unlikely, which ends the draft."""
    kept_NV = np.where(rows_NV >= 0.2, rows_NV, 0.0)
    return np.concatenate([kept_NV, 1.0 - kept_NV.sum(1, keepdims=True)], 1)


WRONG = {
    "an argmax draft is scored softly": Verifier(rule=token, reach=token_reach, proposes=most_likely),
    "recovery from p": Verifier(rule=recovers_from_the_target, reach=token_reach),
    "acceptance with p, a soft residual": Verifier(rule=accepts_by_the_target_alone, reach=fixed_reach),
    "soft acceptance, a one-hot residual": Verifier(rule=takes_off_the_draft_alone, reach=token_reach),
    "block acceptance, a token-wise residual": Verifier(rule=block_with_a_token_residual, reach=block_reach),
    "typical acceptance": Verifier(rule=typical_acceptance, reach=token_reach),
    "unlikely drafts are dropped": Verifier(rule=token, reach=token_reach, proposes=likely_ones),
    "the coin serves twice": Verifier(rule=recovers_with_the_accept_coin, reach=token_reach),
}
LAWS = {"law_is_exact", "first_token_holds_on_a_sweep", "law_of_drawn_windows"}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_pass(name: str) -> None:
    report = run_checks(lossless_checks(RIGHT[name], num_sweeps=1))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_pass_the_whole_sweep(name: str) -> None:
    report = run_checks(lossless_checks(RIGHT[name]))
    assert report.ok, str(report)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_fail_every_check_of_a_law(name: str) -> None:
    """The wrong residual of block verification shows with two drafts, and the sweep has one."""
    expected = LAWS - ({"first_token_holds_on_a_sweep"} if "block" in name else set())
    checks = [check for check in lossless_checks(WRONG[name], num_sweeps=1) if check.name in LAWS]
    assert set(run_checks(checks).failed) == expected


def bernoulli_divergence(p: Floats, q: Floats) -> Floats:
    found: Floats = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_sixth_of_the_windows_would_do(name: str) -> None:
    """From exact laws, no sampling: at 8,000 windows the cell test misses a wrong rule once in a million runs at most.

    Chernoff: a count whose chance is rho falls on the wrong side of t with at most exp(-N KL(t || rho)); between rho
    and the target's pi there is a t beyond which the test fails.
    """
    chain = searched_chain()
    due, found = chain.joint(), enumerate_chains(WRONG[name], [chain])[0].joint
    limit = math.log(2 * len(due) / DELTA)
    thresholds = due + (found - due) * np.linspace(0.01, 0.99, 99)[:, None]
    is_alarm = 8000 * bernoulli_divergence(thresholds, due) > limit
    is_sure = 8000 * bernoulli_divergence(thresholds, found) > math.log(1e6)
    assert (is_alarm & is_sure).any()
    assert NUM_WINDOWS > 6 * 8000


def keeps_at_equality(windows: Windows) -> Verdict:
    is_kept_D = windows.coins_D * windows.proposal_of_drafts() <= windows.target_of_drafts()
    num_kept_S = windows.count_leading(is_kept_D)
    return Verdict(num_kept_S, draw_last(windows, num_kept_S))


def mixes_its_coins(windows: Windows) -> Verdict:
    """In a batch of forty each sequence recovers with its neighbour's coin: no law notices."""
    is_odd = len(windows.num_drafts) == 40
    return token(replace(windows, recover_S=windows.recover_S.roll(1)) if is_odd else windows)


def clears_its_coins(windows: Windows) -> Verdict:
    verdict = token(windows)
    windows.recover_S.fill_(0.5)
    return verdict


BROKEN: dict[str, tuple[Verifier, set[str]]] = {
    "keeps fewer than it could": (
        Verifier(rule=token, reach=token_reach, shows_rows=False),
        {"acceptance_is_exact", "acceptance_of_drawn_windows"},
    ),
    "keeps at equality": (Verifier(rule=keeps_at_equality, reach=token_reach), {"impossible_tokens_never_come"}),
    "mixes its coins": (Verifier(rule=mixes_its_coins, reach=token_reach), {"windows_are_independent"}),
    "clears its coins": (Verifier(rule=clears_its_coins, reach=token_reach), {"inputs_are_not_changed"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_other_faults_fail_their_own_checks(name: str) -> None:
    """Without the enumeration of the law, which is the slow one and which they pass as `token` does."""
    verifier, expected = BROKEN[name]
    skipped = {"law_is_exact"} | ({"acceptance_is_exact"} - expected)
    checks = [check for check in lossless_checks(verifier, num_sweeps=1) if check.name not in skipped]
    assert set(run_checks(checks).failed) == expected


def test_every_check_can_fail() -> None:
    found = {check.name for check in lossless_checks(RIGHT["token"])}
    assert found == LAWS.union(*(expected for _, expected in BROKEN.values()))


def forgets_refused_siblings(windows: Windows, parents: Sequence[int]) -> TreeVerdict:
    """The last token may be one that was refused."""
    verdict = siblings(windows, parents)
    return TreeVerdict(verdict.row_S, from_target(windows, verdict.row_S))


def keeps_later_siblings_too_often(windows: Windows, parents: Sequence[int]) -> TreeVerdict:
    """A sibling behind another is tried with half its coin."""
    row_D = windows.first_row_S[windows.owner_D] + torch.tensor(parents)
    is_later_D = torch.cat([torch.tensor([False]), row_D[1:] == row_D[:-1]])
    return siblings(replace(windows, coins_D=windows.coins_D.where(~is_later_D, windows.coins_D / 2)), parents)


def test_fixed_siblings_pass() -> None:
    report = run_checks(tree_checks(siblings))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (forgets_refused_siblings, {"law_of_trees_is_exact"}),
        (keeps_later_siblings_too_often, {"law_of_trees_is_exact", "acceptance_of_trees_is_exact"}),
    ],
)
def test_wrong_rules_for_siblings_fail(
    rule: Callable[[Windows, Sequence[int]], TreeVerdict], expected: set[str]
) -> None:
    assert set(run_checks(tree_checks(rule)).failed) == expected
