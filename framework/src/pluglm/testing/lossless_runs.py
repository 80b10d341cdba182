"""Runs a rule on windows made from tables: for every case, for a sweep of coins, for many drawn ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pluglm.testing.lossless_boxes import Floats, Ints, measure
from pluglm.testing.lossless_chains import Cases, Chain, Proposes, cases, drawn
from pluglm.verification import Verdict, Windows

# C: cases, N: windows in one batch, n: drafts of a window, V: vocabulary

Reach = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A rule, and how ids are proposed for it.

    reach: p and q of the drafts, [C, n] each, to the chance that the first i + 1 of them are kept, [C, n].
    proposes: the law of the drafter's next id, by its row. shows_rows: whether the rule is given the drafter's rows.
    """

    rule: Callable[[Windows], Verdict]
    reach: Reach
    proposes: Proposes = drawn
    shows_rows: bool = True


class Exact(NamedTuple):
    """Of one chain: the law of k + 1 tokens, and the chance that at least i + 1 drafts are kept, found and due."""

    joint: Floats
    kept: Floats
    kept_due: Floats


def run_cases(verifier: Verifier, some: Cases, case_N: Ints, coins: Floats, recover_N: Floats) -> tuple[Ints, Ints]:
    """How many drafts are kept, and the id behind them, int64 [N] both. coins: [N, n]."""
    num_drafts = coins.shape[1]
    draft = torch.from_numpy(some.draft[case_N].astype(np.float32)).flatten(0, 1) if verifier.shows_rows else None
    verdict = verifier.rule(
        Windows(
            num_drafts=(num_drafts,) * len(case_N),
            drafts_D=torch.from_numpy(some.drafts_Cn[case_N].reshape(-1)),
            target_TV=torch.from_numpy(some.target[case_N].astype(np.float32)).flatten(0, 1),
            proposal_DV=draft,
            coins_D=torch.from_numpy(coins.flatten()),
            recover_S=torch.from_numpy(recover_N.copy()),
        )
    )
    return verdict.num_kept_S.numpy(), verdict.last_S.numpy()


def enumerate_chains(verifier: Verifier, chains: Sequence[Chain]) -> list[Exact]:
    """What the rule does on each chain, exactly but for 1e-7: every proposal, every volume of coins."""
    width, most = chains[0].num_tokens, len(chains[0].draft)
    emitted = [[np.zeros((width**place, width)) for place in range(most + 1)] for _ in chains]
    kept = np.zeros((len(chains), most))
    for some in cases(list(chains), verifier.proposes):
        num_drafts = some.drafts_Cn.shape[1]
        law = _law_of_cases(verifier, some).reshape(-1, num_drafts + 1, width) * some.chance_C[:, None, None]
        for place in range(num_drafts + 1):
            context_C = some.context_C // width ** (num_drafts - place)
            for number in range(len(chains)):
                of_chain = some.chain_C == number
                np.add.at(emitted[number][place], context_C[of_chain], law[of_chain, place])
            if place < num_drafts:
                np.add.at(kept[:, place], some.chain_C, law[:, place + 1 :].sum((1, 2)))
    kept_due = chance_kept(verifier, chains)
    return [Exact(chain.complete(emitted[i]), kept[i], kept_due[i]) for i, chain in enumerate(chains)]


def chance_kept(verifier: Verifier, chains: Sequence[Chain]) -> Floats:
    """The chance that at least i + 1 drafts are kept by what `reach` says, [chains, k]; the rule is not run."""
    due = np.zeros((len(chains), len(chains[0].draft)))
    for some in cases(list(chains), verifier.proposes):
        num_drafts, tokens = some.drafts_Cn.shape[1], some.drafts_Cn[:, :, None]
        p = np.take_along_axis(some.target[:, :num_drafts], tokens, 2)[:, :, 0]
        q = np.take_along_axis(some.draft, tokens, 2)[:, :, 0]
        np.add.at(due[:, :num_drafts], some.chain_C, verifier.reach(p, q) * some.chance_C[:, None])
    return due


def _law_of_cases(verifier: Verifier, some: Cases) -> Floats:
    num_drafts, width = some.drafts_Cn.shape[1], some.target.shape[2]

    def evaluate(case_N: Ints, uniforms: Floats) -> Ints:
        kept_N, last_N = run_cases(verifier, some, case_N, uniforms[:, :num_drafts], uniforms[:, num_drafts])
        codes_N: Ints = kept_N * width + last_N
        return codes_N

    return measure(evaluate, len(some.chance_C), num_drafts + 1, (num_drafts + 1) * width)
