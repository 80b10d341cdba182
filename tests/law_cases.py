"""A target of four tokens whose law of text is known: tables in place of a model, a drafter and a grammar beside it.

The tables are read through the real KV, so what a rule keeps must also be what is stored. Final rows are computed from
them in float64 by `pluglm.testing.lossless_filters`, which was written from the definitions of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import fake_config, ids

from pluglm import Engine, SamplingParams
from pluglm.backends.fake import FakeBackend
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import ROWS, Drafter, DraftRequest, Proposal
from pluglm.kernel.interfaces.grammar import Grammar, GrammarSpec
from pluglm.testing.lossless_filters import (
    FILTERS,
    FREQUENCY,
    MIN_P,
    PRESENCE,
    PROMPT,
    REPETITION,
    TOP_P,
    Floats,
    softmax,
)
from pluglm.testing.statistics import cell_test

# R: rows with logits, V: vocabulary

NUM_TOKENS = 4
LENGTH = 4  # of a text, so that most of them take several windows
_RANDOM = np.random.default_rng(8)
TARGET = _RANDOM.normal(0.0, 1.2, (NUM_TOKENS, NUM_TOKENS, NUM_TOKENS)).astype(np.float32)  # by the last two tokens
NEAR = 0.6 * TARGET + _RANDOM.normal(0.0, 0.8, TARGET.shape)  # the drafter's
XTC_PROBABILITY, XTC_THRESHOLD = 0.4, 0.2
DELTA = 1e-8  # of one cell test; the suite makes less than a hundred
BATCH = 256

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": TOP_P},
    "min_p": {"min_p": MIN_P},
    "penalties": {"repetition_penalty": REPETITION, "frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE},
    "grammar": {"grammar": {"kind": "letters", "value": ""}},
}
PARAMS["everything"] = {key: value for fields in PARAMS.values() for key, value in fields.items()}
PARAMS["xtc"] = {"xtc_probability": XTC_PROBABILITY, "xtc_threshold": XTC_THRESHOLD}


def params_of(name: str, seed: int, **more: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, "seed": seed}
    return SamplingParams.model_validate({**fields, **PARAMS[name], **more})


def final_row(name: str, context: Sequence[int]) -> Floats:
    """The target's law of the token behind this output."""
    before, last = (*PROMPT, *PROMPT, *context)[-2:]
    logits = TARGET[before, last].astype(np.float64)
    if name != "xtc":
        return softmax(FILTERS[name](logits, context))
    row = softmax(logits)
    top = np.flatnonzero(row >= XTC_THRESHOLD)
    without = logits.copy()
    if len(top) > 1:
        without[np.delete(top, row[top].argmin())] = -np.inf
    mixed: Floats = (1 - XTC_PROBABILITY) * row + XTC_PROBABILITY * softmax(without)
    return mixed


def joint_law(name: str, length: int = LENGTH) -> list[float]:
    """Of texts of that length, the first token most significant."""
    return [
        float(np.prod([final_row(name, text[:place])[text[place]] for place in range(length)]))
        for text in product(range(NUM_TOKENS), repeat=length)
    ]


class TableBackend(FakeBackend):
    """Logits of a row by the last two tokens that its KV gives back; before the text is its first token once more."""

    def _logits(self, inputs: Any, kv: Any, spec: Any) -> torch.Tensor:
        stored = kv.keys(0).flatten().tolist()
        rows = [self._row(inputs, stored, row) for row in inputs.logit_rows_R.tolist()]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, spec.vocab_size))

    def _row(self, inputs: Any, stored: list[int], row: int) -> Any:
        segment = next(s for s in inputs.segments if s.query_start <= row < s.query_start + s.num_query)
        position = segment.num_context + row - segment.query_start
        size = inputs.block_size
        before, last = (
            stored[segment.block_table[place // size] * size + place % size]
            for place in (max(0, position - 1), position)
        )
        return TARGET[before, last]


class TableDrafter(Drafter):
    """Draws up to two tokens from tables near the target's, and says so."""

    Config = ComponentConfig
    interface_version = 2
    num_tokens = 2

    def __init__(self, config: Any, context: Any) -> None:
        pass

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({ROWS}))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self.one(request) for request in requests]

    def one(self, request: DraftRequest) -> Proposal:
        known, rows = list(request.token_ids), []
        for coin in request.coins(min(self.num_tokens, request.max_tokens)):
            row_V = softmax(NEAR[(*PROMPT, *known)[-2], known[-1]])
            rows.append(row_V)
            known.append(min(int(np.searchsorted(self.drawn(row_V).cumsum(), coin, side="right")), NUM_TOKENS - 1))
        ids = known[len(request.token_ids) :]
        return Proposal(ids, torch.tensor(np.array(rows), dtype=torch.float32) if ids else None)

    def drawn(self, row_V: Floats) -> Floats:
        """The law of the draw; another one than row_V is a lie."""
        return row_V

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Nothing is learnt."""

    def release(self, sequence_id: int) -> None:
        """Nothing was kept."""


class LyingDrafter(TableDrafter):
    """Draws from its rows to the power of two."""

    def drawn(self, row_V: Floats) -> Floats:
        cold_V: Floats = row_V**2 / (row_V**2).sum()
        return cold_V


class LetterGrammar(Grammar):
    """No token follows itself, and the last one comes once at most: `lossless_filters.grammar`."""

    Config = ComponentConfig
    interface_version = 1

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def compile(self, spec: GrammarSpec) -> Any:
        return LetterMatcher()


class LetterMatcher:
    terminated = False

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self) -> list[int]:
        banned = {*self.text[-1:], *({NUM_TOKENS - 1} & set(self.text))}
        return [token for token in range(NUM_TOKENS) if token not in banned]

    def fill_mask(self, mask_W: Any) -> None:
        mask_W[:] = 0
        mask_W[0] = sum(1 << token for token in self.allowed())

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.text.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self.text):
            raise ValueError(f"cannot roll back {num_tokens} of {len(self.text)}")
        del self.text[len(self.text) - num_tokens :]

    def forced(self) -> list[int]:
        return []


def engine_for(
    model: Path, rule: str = "reproducible", drafter: str | None = "law_cases:TableDrafter", **slots: Any
) -> Engine:
    engine = {"verification": rule, "max_num_seqs": BATCH, "max_step_tokens": 2 * BATCH + 37}
    settings = {
        "backend": {"use": "law_cases:TableBackend", "vocab_size": NUM_TOKENS},
        "grammar": "law_cases:LetterGrammar",
        "drafter": drafter,
        "engine": {**engine, **slots.pop("engine", {})},
    }
    return Engine.from_config(fake_config(model, **{**settings, **slots}))


def texts_of(engine: Engine, names: Sequence[str], num: int) -> dict[str, list[tuple[int, ...]]]:
    """`num` texts under each of the named params, neighbours under others."""
    wanted = [(name, number) for number in range(num) for name in names]
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for first in range(0, len(wanted), 4 * BATCH):
        some = wanted[first : first + 4 * BATCH]
        outputs = engine.generate([ids(*PROMPT) for _ in some], [params_of(*one) for one in some])
        for (name, _), output in zip(some, outputs, strict=True):
            assert output.error is None, output.error
            found[name].append(tuple(output.token_ids))
    return found


def problem_of(texts: Sequence[tuple[int, ...]], name: str) -> str | None:
    """Of the joint laws of the first two, three and four tokens: 16, 64 and 256 cells."""
    for length in range(2, LENGTH + 1):
        counts = Counter(text[:length] for text in texts)
        cells = [counts[cell] for cell in product(range(NUM_TOKENS), repeat=length)]
        if problem := cell_test(cells, joint_law(name, length), DELTA):
            return f"{length} tokens: {problem}"
    return None
