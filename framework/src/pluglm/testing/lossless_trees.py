"""The contract kit of verification for trees of fixed proposals: the same law, by enumeration of all coins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.lossless_boxes import Floats, Ints, measure
from pluglm.testing.lossless_chains import Chain
from pluglm.testing.lossless_tables import filtered_chains
from pluglm.verification import TreeVerdict, Windows

# N: windows in one batch, n: nodes of the tree, V: vocabulary

TreeRule = Callable[[Windows, Sequence[int]], TreeVerdict]
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Tree:
    """parents: 0 for a child of the root, j + 1 for one of node j, which comes before it. tokens: of each node."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    def path(self, row: int) -> tuple[int, ...]:
        """The tokens from the root down to row, which is 0 for the root and j + 1 for node j."""
        return (*self.path(self.parents[row - 1]), self.tokens[row - 1]) if row else ()


# Two, one and three siblings at two levels; a chain; all tokens of V = 4 as siblings; a token twice among siblings.
TREES = (
    Tree((0, 0, 1, 1, 2), (2, 0, 1, 3, 3)),
    Tree((0, 1), (1, 2)),
    Tree((0, 0, 0, 0), (3, 1, 0, 2)),
    Tree((0, 0, 0, 1, 3), (1, 1, 3, 0, 2)),
)
NUM_TOKENS, DEPTH = 4, 2


def tree_checks(rule: TreeRule) -> Iterator[Check]:
    for function in (law_of_trees_is_exact, acceptance_of_trees_is_exact):
        yield make_check(function, rule)


def law_of_trees_is_exact(rule: TreeRule) -> None:
    for tree, where, chain, law in _laws(rule):
        emitted = [np.zeros((NUM_TOKENS**place, NUM_TOKENS)) for place in range(DEPTH + 1)]
        for row, chances in enumerate(law):
            emitted[len(tree.path(row))][_number(tree.path(row))] += chances
        error = float(np.abs(chain.complete(emitted) - chain.joint()).max())
        expect(error <= TOLERANCE, f"the target's joint law ({where})", f"a cell that is off by {error:.2g}")


def acceptance_of_trees_is_exact(rule: TreeRule) -> None:
    """A walk gets to a node exactly when the target would say the tokens down to it."""
    for tree, where, chain, law in _laws(rule):
        ends, paths = law.sum(1), [tree.path(row) for row in range(len(law))]
        for path in set(paths):
            found = sum(ends[row] for row, one in enumerate(paths) if one[: len(path)] == path)
            due = _chance(chain, path)
            expect(abs(found - due) <= TOLERANCE, f"{path} kept with chance {due:.6f} ({where})", f"{found:.6f}")


def _laws(rule: TreeRule) -> Iterator[tuple[Tree, str, Chain, Floats]]:
    """The law of rows and tokens for every tree and chain, and where that is."""
    chains = filtered_chains(NUM_TOKENS, DEPTH)
    for tree in TREES:
        laws = _laws_of_rows(rule, list(chains.values()), tree)
        for name, chain, law in zip(chains, chains.values(), laws, strict=True):
            yield tree, f"{tree}, {name}", chain, law


def _number(path: Sequence[int]) -> int:
    number = 0
    for token in path:
        number = number * NUM_TOKENS + token
    return number


def _chance(chain: Chain, path: Sequence[int]) -> float:
    return float(np.prod([chain.target[place][_number(path[:place]), token] for place, token in enumerate(path)]))


def _laws_of_rows(rule: TreeRule, chains: Sequence[Chain], tree: Tree) -> Floats:
    """The chance that the walk ends at a row and that a token is drawn from it, [chains, n + 1, V]."""
    num_nodes = len(tree.tokens)
    paths = [tree.path(row) for row in range(num_nodes + 1)]
    rows = np.array([[chain.target[len(path)][_number(path)] for path in paths] for chain in chains], dtype=np.float32)

    def evaluate(case_N: Ints, uniforms: Floats) -> Ints:
        windows = Windows(
            num_drafts=(num_nodes,) * len(case_N),
            drafts_D=torch.tensor(tree.tokens).repeat(len(case_N)),
            target_TV=torch.from_numpy(rows[case_N]).flatten(0, 1),
            proposal_DV=None,
            coins_D=torch.from_numpy(uniforms[:, :num_nodes].reshape(-1)),
            recover_S=torch.from_numpy(uniforms[:, num_nodes].copy()),
        )
        verdict = rule(windows, tree.parents * len(case_N))
        codes: Ints = (verdict.row_S * NUM_TOKENS + verdict.last_S).numpy()
        return codes

    law = measure(evaluate, len(chains), num_nodes + 1, (num_nodes + 1) * NUM_TOKENS)
    return law.reshape(len(chains), num_nodes + 1, NUM_TOKENS)
