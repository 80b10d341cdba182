"""Beam search (Lowerre, "The Harpy speech recognition system", 1976) as a search that drives forks of a request.

Scores, candidates and the stopping rule are those of `generate(num_beams=...)` of the transformers library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import Field, StrictInt

from pluglm.kernel.errors import RequestError, nearest
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.search import Branch, Hypothesis, Search, Walk
from pluglm_samplers.ranking import keep_best

# L: lanes, V: vocabulary

KEYS = ("early_stopping", "length_penalty", "width")
MAX_PENALTY = 10  # its power of the longest context stays far inside float64


class BeamConfig(ComponentConfig):
    """max_width: the widest beam that a request may ask for; each of its lanes is a sequence with KV of its own."""

    max_width: StrictInt = Field(default=64, ge=1, le=1024)


class BeamSearch(Search):
    """Beam search. A request's options: width (lanes that are kept, n or more), length_penalty, early_stopping.

    length_penalty (1.0): hypotheses are ranked by their log-probability over length ** length_penalty. early_stopping
    (false): end with the first `width` hypotheses, instead of when the best lane cannot beat them at its length.
    """

    interface_version = 1
    Config = BeamConfig

    def __init__(self, config: BeamConfig, context: BuildContext) -> None:
        self._max_width = config.max_width
        self._eos_token_ids = context.eos_token_ids

    def check(self, options: Mapping[str, Any], num_results: int) -> str | None:
        """Names the first option that is missing, unknown or out of range, and what it may be."""
        if unknown := [key for key in options if key not in KEYS]:
            hint = nearest(str(unknown[0]), KEYS)
            return f"search: unknown option {unknown[0]!r}{hint}; known options: {', '.join(KEYS)}"
        if num_results > self._max_width:
            return f"n = {num_results} needs a search.width of as much, and at most {self._max_width} is allowed here"
        width: Any = options.get("width")
        penalty, early = options.get("length_penalty", 1.0), _early_stopping(options)
        if not _is_number(width, int) or not num_results <= width <= self._max_width:
            allowed = f"an integer from {num_results} (n) to {self._max_width} (max_width of the search's config)"
            return f"search.width must be {allowed}, not {width!r}"
        if not _is_number(penalty, int | float) or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            return f"search.length_penalty must be a number from -{MAX_PENALTY} to {MAX_PENALTY}, not {penalty!r}"
        if not isinstance(early, bool):
            return f"search.early_stopping must be true or false, not {early!r}"
        return None

    def start(self, options: Mapping[str, Any], num_results: int, max_tokens: int, ignore_eos: bool) -> Walk:
        """ValueError for options that `check` refuses."""
        if problem := self.check(options, num_results):
            raise ValueError(problem)
        return BeamWalk(
            width=options["width"],
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=_early_stopping(options),
            num_results=num_results,
            max_tokens=max_tokens,
            eos_token_ids=frozenset() if ignore_eos else self._eos_token_ids,
        )


def _early_stopping(options: Mapping[str, Any]) -> Any:
    return options.get("early_stopping", False)


def _is_number(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


class _Candidate(NamedTuple):
    """A lane and one token more. score: the sum of its log-probabilities, float32."""

    score: float
    lane: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Path:
    """A lane: its output tokens and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    score: float


class BeamWalk(Walk):
    """Keeps the `width` best unfinished lanes, and the `width` best hypotheses by score / length ** length_penalty.

    A candidate that ends is a hypothesis only if it is among the `width` best candidates of its step. The search is
    over at max_tokens; or when there are `width` hypotheses and the best lane, at its present length, would be no
    better than the worst of them (with early_stopping, as soon as there are that many).
    """

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: bool,
        num_results: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._width, self._length_penalty, self._early_stopping = width, length_penalty, early_stopping
        self._num_results, self._max_tokens, self._eos_token_ids = num_results, max_tokens, eos_token_ids
        self._num_tokens = 0
        self._lanes = [_Path((), 0.0)]
        self._hypotheses: list[Hypothesis] = []

    def advance(self, logprobs_LV: torch.Tensor) -> list[Branch]:
        candidates = self._candidates(logprobs_LV)
        self._num_tokens += 1
        is_last = self._num_tokens == self._max_tokens
        ending = [is_last or one.token_id in self._eos_token_ids for one in candidates]
        best = zip(candidates[: self._width], ending, strict=False)
        self._add([self._hypothesis(one) for one, ends in best if ends])
        going_on = [one for one, ends in zip(candidates, ending, strict=True) if not ends][: self._width]
        if not going_on or self._is_over(going_on[0].score):
            return []
        self._lanes = [_Path((*self._lanes[one.lane].token_ids, one.token_id), one.score) for one in going_on]
        return [Branch(one.lane, one.token_id) for one in going_on]

    def results(self) -> list[Hypothesis]:
        """RequestError when fewer outputs than asked for exist at all (of few tokens of a tiny vocabulary)."""
        if len(self._hypotheses) < self._num_results:
            found = f"{len(self._hypotheses)} of up to {self._max_tokens} tokens have a probability"
            raise RequestError(f"too few outputs: {found} and n is {self._num_results}; lower n")
        return self._hypotheses[: self._num_results]

    def _candidates(self, logprobs_LV: torch.Tensor) -> list[_Candidate]:
        """The best continuations of all lanes, best first; ties by lane, then token id.

        At most len(eos_token_ids) of each lane end, so so many more than `width` leave `width` lanes to go on with.
        """
        lane_scores_L = torch.tensor([one.score for one in self._lanes], device=logprobs_LV.device)
        scores_LV = logprobs_LV + lane_scores_L[:, None]
        size = scores_LV.shape[1]
        count = min((1 + len(self._eos_token_ids)) * self._width, scores_LV.numel())
        flat_1V = keep_best(scores_LV.reshape(1, -1), torch.tensor([count], device=scores_LV.device))
        places = torch.nonzero(flat_1V[0] > -math.inf).flatten()
        found = zip(flat_1V[0, places].tolist(), places.tolist(), strict=True)
        ranked = sorted(found, key=lambda one: (-one[0], one[1]))
        return [_Candidate(score, place // size, place % size) for score, place in ranked]

    def _hypothesis(self, one: _Candidate) -> Hypothesis:
        token_ids = (*self._lanes[one.lane].token_ids, one.token_id)
        score = self._normalised(one.score)
        return Hypothesis(token_ids=token_ids, score=score, stopped=one.token_id in self._eos_token_ids)

    def _add(self, found: Sequence[Hypothesis]) -> None:
        ranked = sorted([*self._hypotheses, *found], key=lambda one: -one.score)  # ties: who ended first
        self._hypotheses = ranked[: self._width]

    def _is_over(self, best_score: float) -> bool:
        if len(self._hypotheses) < self._width:
            return False
        return self._early_stopping or self._normalised(best_score) <= self._hypotheses[-1].score

    def _normalised(self, score: float) -> float:
        """Of a hypothesis or lane of the present length."""
        return score / math.pow(self._num_tokens, self._length_penalty)
