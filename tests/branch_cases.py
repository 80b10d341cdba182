"""Drafters that propose trees: one that knows the right text and hides it in branches, and one of likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from law_cases import NEAR, PROMPT, TableDrafter

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest, Proposal


def within(limit: int, first: list[int], branches: list[list[int]]) -> Proposal:
    """What of each way may be proposed."""
    return Proposal(first[:limit], branches=[branch[:limit] for branch in branches])


def wrong(token: int) -> int:
    return token - 1 if token else 1


class OracleConfig(ComponentConfig):
    """texts: prompts with their outputs."""

    texts: tuple[tuple[int, ...], ...]


class OracleDrafter(Drafter):
    """Proposes the text that a request is the beginning of, in trees of several shapes in turn."""

    Config = OracleConfig
    interface_version = 2

    def __init__(self, config: OracleConfig, context: Any) -> None:
        self._texts = [list(text) for text in config.texts]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self.one(request) for request in requests]

    def one(self, request: DraftRequest) -> Proposal:
        known = request.token_ids
        for text in self._texts:
            if text[: len(known)] == known and len(text) > len(known) + 3:
                return within(request.max_tokens, *self.shape(len(known), text[len(known) :]))
        return within(request.max_tokens, [1], [[2, 3], [2, 4], [1]])

    def shape(self, number: int, rest: list[int]) -> tuple[list[int], list[list[int]]]:
        one, two, three = rest[:3]
        shapes: tuple[tuple[list[int], list[list[int]]], ...] = (
            ([wrong(one)], [[one, two, three]]),
            ([one, wrong(two)], [[one, two, wrong(three)], [wrong(one), 5], [one, two, three, *rest[3:4]]]),
            ([], [[wrong(one)], [one, two]]),
            ([one, two], [[one, two], [one], [], [one, two, three], [one, two, three]]),
            ([wrong(one), 3], [[wrong(one), 4], [wrong(wrong(one))]]),
            ([one, two, three], [[one, wrong(two)]]),
        )
        return shapes[number % len(shapes)]

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """It knows all."""

    def release(self, sequence_id: int) -> None:
        """Nothing was kept."""


class HiddenConfig(OracleConfig):
    """branches: proposes them; else nothing."""

    branches: bool


class HiddenDrafter(OracleDrafter):
    """Keeps the hidden state behind every text that it is lent. rows: by that text."""

    Config = HiddenConfig

    def __init__(self, config: HiddenConfig, context: Any) -> None:
        super().__init__(config, context)
        context.target.use_hidden_states()
        self._target, self._branches = context.target, config.branches
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}

    def one(self, request: DraftRequest) -> Proposal:
        known = request.token_ids
        if hidden := self._target.take_hidden(request.sequence_id, len(known) - 1):
            for place, row_D in enumerate(hidden.rows_nD):
                self.rows[tuple(known[: hidden.start + place + 1])] = row_D.clone()
        return super().one(request) if self._branches else Proposal([])


class LikelyDrafter(TableDrafter):
    """The likely tokens of the tables, as a tree; behind token 0 one drawn line, with its rows."""

    def one(self, request: DraftRequest) -> Proposal:
        if request.token_ids[-1] == 0:
            return super().one(request)
        known = [*PROMPT, *request.token_ids]
        best, second, third, _ = _ranked(known[-2], known[-1])
        behind = _ranked(known[-1], best)
        first = [best, behind[0]]
        branches = [[second, _ranked(known[-1], second)[0]], [best, behind[1]], [second, third], [third]]
        return within(request.max_tokens, first, branches)


def _ranked(before: int, last: int) -> list[int]:
    return [int(token) for token in np.argsort(-NEAR[before, last], kind="stable")]


def taken(engine: Any) -> int:
    """Branches that texts went on in."""
    return int(engine._core._planning.num_taken)


def oracle(texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The slot of a drafter that knows these texts."""
    return {"use": "branch_cases:OracleDrafter", "texts": [list(text) for text in texts]}
