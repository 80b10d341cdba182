"""A target and a drafter as tables, one row for each context: what can be known about them without any rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from pluglm.testing.lossless_boxes import Ints
from pluglm.testing.lossless_filters import Filter, Floats, softmax

# C: cases, n: drafts of a case, N: rows, V: vocabulary; contexts of i tokens are numbered in base V

Proposes = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class Chain:
    """target[i] is [V ** i, V] for i in 0..k, draft[i] the same for i in 0..k - 1; float64 rows that sum to 1."""

    target: tuple[Floats, ...]
    draft: tuple[Floats, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.target[0].shape[1])

    def joint(self) -> Floats:
        """The target's law of k + 1 tokens, [V ** (k + 1)]."""
        return self.complete([np.zeros((len(rows), self.num_tokens)) for rows in self.target], np.ones(1))

    def complete(self, emitted: list[Floats], open_mass: Floats | None = None) -> Floats:
        """The law of k + 1 tokens when runs of i + 1 tokens have the masses emitted[i] [V ** i, V], and the target goes
        on behind them. open_mass: of the empty run."""
        mass = np.zeros(1) if open_mass is None else open_mass
        for rows, runs in zip(self.target, emitted, strict=True):
            mass = (mass[:, None] * rows + runs).reshape(-1)
        return mass


class Cases(NamedTuple):
    """Windows of n drafts: with what chance the drafter proposes them, and the rows that belong to them.

    chance_C sums to 1 over all cases of a chain. chain_C: which of several chains. context_C: the number of the drafts.
    """

    chain_C: Ints
    chance_C: Floats
    context_C: Ints
    drafts_Cn: Ints
    target: Floats  # [C, n + 1, V]
    draft: Floats  # [C, n, V]


def drawn(rows_NV: Floats) -> Floats:
    """The law of an honest drafter's next id, [N, V + 1]: that of the row. The last column is for no proposal."""
    return np.pad(rows_NV, ((0, 0), (0, 1)))


def most_likely(rows_NV: Floats) -> Floats:
    """The law of a greedy drafter's next id: one id for certain."""
    law: Floats = np.eye(rows_NV.shape[1] + 1)[rows_NV.argmax(1)]
    return law


def cases(chains: list[Chain], proposes: Proposes) -> Iterator[Cases]:
    """Every window that can be proposed, one Cases for each number of drafts. The chains have one k and one V."""
    num_tokens, most = chains[0].num_tokens, len(chains[0].draft)
    for num_drafts in range(most + 1):
        paths = np.array(list(product(range(num_tokens), repeat=num_drafts)), dtype=np.int64)
        paths = paths.reshape(num_tokens**num_drafts, num_drafts)
        contexts = [_context_numbers(paths[:, :length], num_tokens) for length in range(num_drafts + 1)]
        found = [
            _cases_of(number, chain, paths, contexts, proposes, num_drafts < most)
            for number, chain in enumerate(chains)
        ]
        joined = Cases(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        if len(joined.chance_C):
            yield joined


def _cases_of(
    number: int, chain: Chain, paths: Ints, contexts: list[Ints], proposes: Proposes, is_short: bool
) -> Cases:
    num_drafts = paths.shape[1]
    chance = np.ones(len(paths))
    for place in range(num_drafts):
        chance = chance * proposes(chain.draft[place])[contexts[place], paths[:, place]]
    if is_short:
        chance = chance * proposes(chain.draft[num_drafts])[contexts[-1], -1]
    target = np.stack([chain.target[place][contexts[place]] for place in range(num_drafts + 1)], 1)
    draft = np.zeros((len(paths), 0, chain.num_tokens))
    if num_drafts:
        draft = np.stack([chain.draft[place][contexts[place]] for place in range(num_drafts)], 1)
    have = chance > 0
    numbers = np.full(int(have.sum()), number)
    return Cases(numbers, chance[have], contexts[-1][have], paths[have], target[have], draft[have])


def _context_numbers(paths: Ints, num_tokens: int) -> Ints:
    numbers = np.zeros(len(paths), dtype=np.int64)
    for place in range(paths.shape[1]):
        numbers = numbers * num_tokens + paths[:, place]
    return numbers


def random_chain(num_tokens: int, num_drafts: int, seed: int, on_target: Filter, on_draft: Filter) -> Chain:
    """Normal logits for each context, the drafter's near the target's; each of the filters sees its context."""
    random = np.random.default_rng(seed)
    target, draft = list[Floats](), list[Floats]()
    for depth in range(num_drafts + 1):
        contexts = list(product(range(num_tokens), repeat=depth))
        logits = random.normal(0.0, 1.2, (len(contexts), num_tokens))
        near = 0.6 * logits + random.normal(0.0, 0.8, logits.shape)
        target.append(np.stack([softmax(on_target(*one)) for one in zip(logits, contexts, strict=True)]))
        draft.append(np.stack([softmax(on_draft(*one)) for one in zip(near, contexts, strict=True)]))
    return Chain(tuple(target), tuple(draft[:-1]))
