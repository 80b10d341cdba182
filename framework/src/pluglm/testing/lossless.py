"""The contract kit of verification: whether a rule gives the target's own law of text, whatever is proposed to it.

Not a kit of a component: a rule is a function of `pluglm.verification.Windows`. Nothing here looks inside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.lossless_chains import Chain
from pluglm.testing.lossless_draws import draw_windows, sweep_first_token
from pluglm.testing.lossless_runs import Exact, Verifier, chance_kept, enumerate_chains
from pluglm.testing.lossless_tables import filtered_chains, searched_chain, sweep_chains
from pluglm.testing.statistics import cell_test
from pluglm.verification import Windows

# S: sequences, D: drafts of all of them, T: target rows, V: vocabulary

SIZES = tuple((num_tokens, num_drafts) for num_tokens in (3, 4, 5) for num_drafts in (1, 2, 3, 4))
TOLERANCE = 1e-6  # rows are float32
NUM_WINDOWS, SEED = 50_000, 2026
DELTA = 1e-6  # the chance that a sound rule fails one of the two sampled checks; those of the rest are 0
NUM_STEPS = 400


@dataclass(frozen=True, slots=True)
class _Subject:
    verifier: Verifier
    num_sweeps: int
    found: dict[tuple[int, int], list[tuple[str, Chain, Exact]]] = field(default_factory=dict)

    def enumerated(self) -> Iterator[tuple[str, Chain, Exact]]:
        """Where, the chain, and what the rule does there; each size once for all checks."""
        for size in SIZES:
            if size not in self.found:
                chains = filtered_chains(*size)
                names = [f"V = {size[0]}, k = {size[1]}, {name}" for name in chains]
                exact = enumerate_chains(self.verifier, list(chains.values()))
                self.found[size] = list(zip(names, chains.values(), exact, strict=True))
            yield from self.found[size]


def lossless_checks(verifier: Verifier, num_sweeps: int = 20) -> Iterator[Check]:
    """Every check of a rule for chains of drafts. num_sweeps: tables of the sweep, at 800,000 windows each."""
    subject = _Subject(verifier, num_sweeps)
    for function in (
        law_is_exact,
        acceptance_is_exact,
        first_token_holds_on_a_sweep,
        law_of_drawn_windows,
        acceptance_of_drawn_windows,
        impossible_tokens_never_come,
        windows_are_independent,
        inputs_are_not_changed,
    ):
        yield make_check(function, subject)


def law_is_exact(subject: _Subject) -> None:
    """By enumeration, on every size and with filters, k + 1 tokens have the target's joint law."""
    for where, chain, exact in subject.enumerated():
        error = float(np.abs(exact.joint - chain.joint()).max())
        expect(error <= TOLERANCE, f"the target's joint law ({where})", f"a cell that is off by {error:.2g}")


def acceptance_is_exact(subject: _Subject) -> None:
    """By enumeration, at least i + 1 drafts are kept as often as `reach` says: exact rules may still be wasteful."""
    for where, _, exact in subject.enumerated():
        error = float(np.abs(exact.kept - exact.kept_due).max())
        expect(error <= TOLERANCE, f"drafts kept with chance {exact.kept_due} ({where})", exact.kept)


def first_token_holds_on_a_sweep(subject: _Subject) -> None:
    """V = 5, k = 1: coin and recovery over 400 x 400 midpoints. No enumeration is trusted; off by 3 / 400 at most."""
    for chain in sweep_chains(subject.num_sweeps):
        law = sweep_first_token(subject.verifier, chain, NUM_STEPS)
        error = float(np.abs(law - chain.target[0][0]).max())
        expect(error <= 3 / NUM_STEPS, "the target's law of the first token", f"a cell that is off by {error:.4f}")


def law_of_drawn_windows(subject: _Subject) -> None:
    """V = 3, k = 2: the cell test of 27 cells on 50,000 windows, in one ragged batch where drafts are."""
    chain = searched_chain()
    tally = draw_windows(subject.verifier, chain, NUM_WINDOWS, SEED)
    problem = cell_test(tally.counts.tolist(), chain.joint().tolist(), DELTA)
    expect(problem is None, "the target's joint law of three tokens", problem)


def acceptance_of_drawn_windows(subject: _Subject) -> None:
    """Hoeffding's bound for each of the k = 2 places, DELTA for both together."""
    chain = searched_chain()
    tally = draw_windows(subject.verifier, chain, NUM_WINDOWS, SEED)
    due = chance_kept(subject.verifier, [chain])[0]
    bound = math.sqrt(math.log(2 * len(due) / DELTA) / (2 * NUM_WINDOWS))
    error = float(np.abs(tally.kept / NUM_WINDOWS - due).max())
    expect(error <= bound, f"drafts kept with chance {due}", tally.kept / NUM_WINDOWS)


def impossible_tokens_never_come(subject: _Subject) -> None:
    """Proposals that the target never says, with coins at both ends; a coin of exactly 0 does not help them either."""
    ends = [0.0, 2.0**-53, 1.0 - 2.0**-53]
    for coin in ends:
        for recover in ends[1:]:
            windows = _never_said(subject.verifier, coin, recover)
            for row, run in enumerate(subject.verifier.rule(windows).runs(windows)):
                chances = [float(windows.target_TV[3 * row + place, token]) for place, token in enumerate(run)]
                expect(min(chances) > 0, f"tokens that the target can say (coin {coin})", f"{run}, with p {chances}")


def _never_said(verifier: Verifier, coin: float, recover: float) -> Windows:
    """Drafts of p = 0 at the first place, at the second, and nowhere; k = 2, V = 4."""
    target_TV = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.25, 0.0, 0.0, 0.75], [0.0, 0.0, 1.0, 0.0]]).repeat(3, 1)
    return Windows(
        num_drafts=(2, 2, 2),
        drafts_D=torch.tensor([0, 3, 1, 1, 2, 3]),
        target_TV=target_TV,
        proposal_DV=torch.full((6, 4), 0.25) if verifier.shows_rows else None,
        coins_D=torch.full((6,), coin, dtype=torch.float64),
        recover_S=torch.full((3,), recover, dtype=torch.float64),
    )


def windows_are_independent(subject: _Subject) -> None:
    """A ragged batch, windows without drafts among them, gives each window the run that it gets alone."""
    whole = _ragged(subject.verifier)
    together = subject.verifier.rule(_ragged(subject.verifier)).runs(whole)
    for number in range(len(whole.num_drafts)):
        one = _alone(whole, number)
        run = subject.verifier.rule(one).runs(one)[0]
        expect(run == together[number], f"window {number} to give {run}, as it does alone", together[number])


def inputs_are_not_changed(subject: _Subject) -> None:
    windows, fresh = _ragged(subject.verifier), _ragged(subject.verifier)
    subject.verifier.rule(windows)
    for name in ("drafts_D", "target_TV", "proposal_DV", "coins_D", "recover_S"):
        before, after = getattr(fresh, name), getattr(windows, name)
        if before is not None:
            expect(torch.equal(before, after), f"{name} as it was", "other values")


def _ragged(verifier: Verifier) -> Windows:
    """Forty windows of 0 to 3 drafts over 7 tokens."""
    random = torch.Generator().manual_seed(7)
    num_drafts = [number % 4 for number in range(40)]
    count = sum(num_drafts)
    target_TV = (torch.randn(count + 40, 7, generator=random) * 1.5).softmax(-1)
    proposal_DV = (torch.randn(count, 7, generator=random) * 0.7).softmax(-1)
    coins = torch.rand(count + 40, generator=random, dtype=torch.float64).clamp_(min=2.0**-53)
    return Windows(
        num_drafts=num_drafts,
        drafts_D=torch.multinomial(proposal_DV, 1, generator=random).squeeze(1),
        target_TV=target_TV,
        proposal_DV=proposal_DV if verifier.shows_rows else None,
        coins_D=coins[:count],
        recover_S=coins[count:],
    )


def _alone(windows: Windows, number: int) -> Windows:
    count = windows.num_drafts[number]
    start = int(windows.first_draft_S[number])
    drafts, rows = slice(start, start + count), slice(start + number, start + number + count + 1)
    return replace(
        windows,
        num_drafts=[count],
        drafts_D=windows.drafts_D[drafts],
        target_TV=windows.target_TV[rows],
        proposal_DV=None if windows.proposal_DV is None else windows.proposal_DV[drafts],
        coins_D=windows.coins_D[drafts],
        recover_S=windows.recover_S[number : number + 1],
    )
