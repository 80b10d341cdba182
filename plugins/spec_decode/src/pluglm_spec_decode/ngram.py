"""The `ngram` drafter: proposes what followed the last few tokens when they occurred before. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter
from pluglm_spec_decode.contexts import MOST_CONTEXT, PRIORS, kinds_of
from pluglm_spec_decode.ngram_search import NgramIndex


class NgramConfig(AdaptiveConfig):
    """The last max_ngram tokens are looked for first, then fewer, down to min_ngram."""

    max_ngram: int = Field(default=3, ge=1, le=32)
    min_ngram: int = Field(default=1, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is over max_ngram {self.max_ngram}; lower min_ngram")
        return self


class NgramDrafter(AdaptiveDrafter):
    """Drafts what followed the last tokens where they stood before: prompt lookup.

    Keeps an index per sequence, which trusts that token_ids only grows until release.
    """

    interface_version = 2
    Config = NgramConfig
    priors = PRIORS

    def __init__(self, config: NgramConfig, context: BuildContext) -> None:
        super().__init__(config)
        self._config = config
        self._indexes: dict[int, NgramIndex] = {}

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self._look_up(request)) for request in requests]

    def _release(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _look_up(self, request: DraftRequest) -> list[int]:
        num_tokens = min(self._config.num_tokens, request.max_tokens)
        return self._index(request).search(request.token_ids, num_tokens) if num_tokens > 0 else []

    def _kinds(self, request: DraftRequest) -> list[int]:
        text = request.token_ids
        size, end = self._index(request).longest(text)
        while 0 < size < min(end, MOST_CONTEXT) and text[end - size - 1] == text[-size - 1]:
            size += 1
        return kinds_of(size, min(self._config.num_tokens, request.max_tokens, len(text) - end))

    def _index(self, request: DraftRequest) -> NgramIndex:
        index = self._indexes.get(request.sequence_id)
        if index is None:
            index = self._indexes[request.sequence_id] = NgramIndex(self._config.max_ngram, self._config.min_ngram)
        return index
