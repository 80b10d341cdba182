"""Log-probabilities of prompts, taken from the steps that compute them. Knows no requests, only sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from pluglm.kernel.core import ModelInput, Segment, TokenLogprobs
from pluglm.kernel.interfaces.target import BranchFollower
from pluglm.kernel.runner import ModelRunner

# R: rows asked for by the engine, S: rows of prompt tokens, V: vocabulary, k: most likely tokens

_ROWS_AT_ONCE = 64  # whose log-probabilities are held beside the logits


@dataclass(slots=True)
class _Prompt:
    """A prompt that is scored as it is computed. scores: of its tokens 1, 2, ... so far."""

    token_ids: tuple[int, ...]
    num_top: int
    scores: list[TokenLogprobs] = field(default_factory=list)


class _Places(NamedTuple):
    """Rows of a batch whose next tokens are a prompt's, from `first`, counted in its scores."""

    prompt: _Prompt
    first: int
    rows: range


class ScoringRunner(ModelRunner):
    """The model's runner, which asks for the logits of further rows where a prompt is to be scored.

    Chunks follow each other, so scores are stitched by their places. What was computed before is not scored again when
    preemption has it computed anew. The prompt's KV must not come from anywhere else.
    """

    def __init__(self, runner: ModelRunner, num_ids: int) -> None:
        """num_ids: ids that the tokenizer knows; the head may have more."""
        super().__init__(runner.backend, runner.model, runner.attention, runner.kv, runner.store)
        self._inner, self._num_ids = runner, num_ids
        self._prompts: dict[int, _Prompt] = {}

    def score(self, sequence_id: int, token_ids: tuple[int, ...], num_top: int) -> None:
        """From its first step on; the rows are raw, before masks and steps."""
        self._prompts[sequence_id] = _Prompt(token_ids, num_top)

    def scores(self, sequence_id: int) -> list[TokenLogprobs | None]:
        """One a prompt token that was computed; None for the first, which nothing comes before."""
        return [None, *self._prompts[sequence_id].scores]

    def forget(self, sequence_id: int) -> None:
        self._prompts.pop(sequence_id, None)

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """As the runner's; logits_RV of the rows that were asked for."""
        return self._scored(inputs, self._inner.run)

    def run_beside(self, inputs: ModelInput, meanwhile: Callable[[], None]) -> torch.Tensor:
        """As the runner's; logits_RV of the rows that were asked for."""
        return self._scored(inputs, lambda wider: self._inner.run_beside(wider, meanwhile))

    def take_over(self, sequence_id: int, branch_id: int) -> None:
        """As of BranchFollower, for a runner that is one."""
        if isinstance(self._inner, BranchFollower):
            self._inner.take_over(sequence_id, branch_id)

    def let_go(self) -> None:
        """Of weights and KV memory, even while somebody holds this runner. Nothing runs any more."""
        for one in (self, self._inner):
            vars(one).update(model=None, attention=None, store=None)

    def _scored(self, inputs: ModelInput, run: Callable[[ModelInput], torch.Tensor]) -> torch.Tensor:
        places = list(self._places(inputs)) if self._prompts else []
        if not places:
            return run(inputs)
        rows_S = torch.tensor([row for place in places for row in place.rows], dtype=torch.int64)
        num_rows = len(inputs.logit_rows_R)
        logits_RV = run(replace(inputs, logit_rows_R=torch.cat([inputs.logit_rows_R, rows_S])))
        start = num_rows
        for place in places:
            stop = start + len(place.rows)
            self._take(place, logits_RV[start:stop])
            start = stop
        return logits_RV[:num_rows]

    def _places(self, inputs: ModelInput) -> Iterator[_Places]:
        for segment in inputs.segments:
            prompt = self._prompts.get(segment.sequence_id)
            if prompt is not None and (place := _unscored(prompt, segment)).rows:
                yield place

    @torch.inference_mode()
    def _take(self, place: _Places, logits_SV: torch.Tensor) -> None:
        prompt, first = place.prompt, place.first
        targets = prompt.token_ids[first + 1 : first + 1 + len(place.rows)]
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), _ROWS_AT_ONCE):
            some = targets[start : start + _ROWS_AT_ONCE]
            found += _logprobs(logits_SV[start : start + len(some), : self._num_ids], some, prompt.num_top)
        prompt.scores += found


def _unscored(prompt: _Prompt, segment: Segment) -> _Places:
    """The row of a token says what is likely behind it, so the prompt's last one is nothing's score."""
    done = len(prompt.scores)
    first = max(done, segment.num_context)
    stop = min(segment.num_keys, len(prompt.token_ids) - 1)
    if first > done and first < stop:
        raise ValueError(f"prompt tokens {done} to {first} were computed elsewhere, so they have no log-probabilities")
    offset = segment.query_start - segment.num_context
    return _Places(prompt, first, range(offset + first, max(offset + stop, offset + first)))


def _logprobs(logits_SV: torch.Tensor, targets: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
    logprobs_SV = torch.log_softmax(logits_SV.float(), dim=-1)
    own_S1 = logprobs_SV.gather(1, torch.tensor(targets, device=logits_SV.device).unsqueeze(1))
    ranks = ((logprobs_SV > own_S1).sum(-1) + 1).tolist()
    top_Sk = torch.topk(logprobs_SV, min(num_top, logprobs_SV.shape[1]))
    tops = [
        {token: value for token, value in zip(*row, strict=True) if value > -math.inf}  # impossible ones are not told
        for row in zip(top_Sk.indices.tolist(), top_Sk.values.tolist(), strict=True)
    ]
    rows = zip(targets, own_S1.flatten().tolist(), ranks, tops, strict=True)
    return [TokenLogprobs(token_id=token, logprob=one, rank=rank, top=top) for token, one, rank, top in rows]
