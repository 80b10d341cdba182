"""The `suffix` drafter: proposes what most often followed the same words, here or in earlier outputs. Needs no model.

The method is suffix decoding (Oliaro et al., 2024, arXiv 2411.04975) with one line of drafts and, if asked for, some
branches of it: the longer the words that occurred before, the more is drafted, and of several contexts the one that
promises the most accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from pluglm.kernel.interfaces.component import BuildContext, Capabilities
from pluglm.kernel.interfaces.drafter import MAX_BRANCHES, SHARES, DraftRequest, Proposal
from pluglm.kernel.interfaces.kv import WHOLE_REGIONS
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter
from pluglm_spec_decode.contexts import PRIORS, kinds_of
from pluglm_spec_decode.past_texts import LEAST_TOKENS, PastTexts
from pluglm_spec_decode.suffix_automaton import ROOT, Context, Continuation, Fork, SuffixAutomaton


class SuffixConfig(AdaptiveConfig):
    """max_context: how many of the last tokens are compared at most. tokens_per_match: drafted for each that occurred.

    min_probability: a draft ends before its product of shares falls below. shared_tokens: output tokens that are kept
    when sequences end, over all tenants and salts, each for others of the same two; 0 shares nothing. num_branches:
    other ways on that are proposed beside the likeliest one; not with adaptive, which knows the costs of one line.
    """

    num_tokens: int = Field(default=8, ge=1, le=32)
    max_context: int = Field(default=32, ge=1, le=256)
    tokens_per_match: float = Field(default=2.0, gt=0, le=32)
    min_probability: float = Field(default=0.1, ge=0, le=1)
    shared_tokens: int = Field(default=32_768, ge=0)
    num_branches: int = Field(default=0, ge=0, le=MAX_BRANCHES)

    @field_validator("shared_tokens")
    @classmethod
    def _something_fits(cls, shared_tokens: int) -> int:
        if 0 < shared_tokens < LEAST_TOKENS:
            raise ValueError(f"{shared_tokens} is too little to keep any output in; use 0 or at least {LEAST_TOKENS}")
        return shared_tokens

    @model_validator(mode="after")
    def _one_line_adapts(self) -> SuffixConfig:
        if self.num_branches and self.adaptive:
            raise ValueError("num_branches is for drafts of fixed length; set adaptive: false or num_branches: 0")
        return self


class _Choice(NamedTuple):
    """What is proposed, and by which context of which texts it was chosen."""

    continuation: Continuation
    context: Context
    automaton: SuffixAutomaton | None


NOTHING = _Choice(Continuation([], 0.0), Context(ROOT, 0), None)
IN_REGIONS = (
    "each branch would copy all KV of its sequence in every step; use kv 'paged' or set drafter.num_branches to 0"
)


class _Searched(NamedTuple):
    """What the last search for a sequence found: in a text of so many tokens, with so many drafts allowed."""

    text_tokens: int
    num_tokens: int
    choice: _Choice

    def holds_for(self, text_tokens: int, num_tokens: int, is_adaptive: bool) -> bool:
        """Also where fewer are allowed, if no more were found: no other choice promises more than it did.

        With `adaptive` however many were found: how many are allowed was decided by the classes of this choice.
        """
        is_enough = is_adaptive or len(self.choice.continuation.token_ids) <= num_tokens
        return self.text_tokens == text_tokens and is_enough and num_tokens <= self.num_tokens


@dataclass(slots=True)
class _Text:
    """A sequence's own automaton. token_ids: what it was built of, and tokens committed since."""

    automaton: SuffixAutomaton
    owner: tuple[str, str]
    num_prompt: int
    token_ids: list[int]

    def follow(self, token_ids: list[int]) -> None:
        for token_id in token_ids[self.automaton.num_tokens :]:
            self.automaton.append(token_id)
        self.token_ids = token_ids


class SuffixDrafter(AdaptiveDrafter):
    """Drafts from a suffix automaton of each text, and from those of outputs that ended.

    It trusts that token_ids only grows until release, as prompt lookup does. A sequence that loses its KV counts as
    ended; when it comes back, its output is counted twice.
    """

    interface_version = 2
    Config = SuffixConfig
    priors = PRIORS

    def __init__(self, config: SuffixConfig, context: BuildContext) -> None:
        super().__init__(config)
        self._config = config
        self._texts: dict[int, _Text] = {}
        self._searched: dict[int, _Searched] = {}  # with `adaptive` a step asks for the classes, then for the drafts
        self._past = PastTexts(config.shared_tokens, config.max_context)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        of_length = super().capabilities(config)
        provides = of_length.provides | ({SHARES} if config.shared_tokens else frozenset())
        refuses = {**of_length.refuses, **({WHOLE_REGIONS: IN_REGIONS} if config.num_branches else {})}
        return replace(of_length, provides=provides, refuses=refuses)

    @classmethod
    def most_tokens(cls, config: Any) -> int:
        return super().most_tokens(config) * (1 + int(config.num_branches))

    @property
    def num_shared_tokens(self) -> int:
        """What is kept of past outputs; at most shared_tokens."""
        return self._past.num_tokens

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._proposal(request) for request in requests]

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Kept for the outputs to come: what was committed last is in no later request of a sequence that ends."""
        if text := self._texts.get(sequence_id):
            text.token_ids = [*text.token_ids, *token_ids]

    def _release(self, sequence_id: int) -> None:
        if text := self._texts.pop(sequence_id, None):
            self._past.add(text.owner, text.token_ids[text.num_prompt :])
            self._searched.clear()  # the past texts are others now

    def _kinds(self, request: DraftRequest) -> list[int]:
        (token_ids, _, first), context, _ = self._choice(request)
        return kinds_of(context.num_tokens, len(token_ids), is_unanimous=first == 1)

    def _proposal(self, request: DraftRequest) -> Proposal:
        choice = self._choice(request)
        token_ids, automaton = choice.continuation.token_ids[: max(0, request.max_tokens)], choice.automaton
        if automaton is None or not self._config.num_branches:
            return Proposal(list(token_ids))
        forks = automaton.forks(choice.context, token_ids, self._config.min_probability)
        likeliest = nsmallest(
            self._config.num_branches, forks, key=lambda fork: (-fork.chance, fork.place, fork.token_id)
        )
        num_tokens = min(self._config.num_tokens, request.max_tokens)
        branches = [[*token_ids[: fork.place], *self._behind(automaton, fork, num_tokens)] for fork in likeliest]
        return Proposal(list(token_ids), branches=branches)

    def _behind(self, automaton: SuffixAutomaton, fork: Fork, num_tokens: int) -> list[int]:
        """The fork's token and its likeliest continuation, which together with it is no less likely than any draft."""
        least = self._config.min_probability / fork.chance
        return [fork.token_id, *automaton.continuation(fork.context, num_tokens - fork.place - 1, least).token_ids]

    def _choice(self, request: DraftRequest) -> _Choice:
        num_tokens = min(self._config.num_tokens, request.max_tokens)
        if num_tokens < 1:
            return NOTHING
        text = self._text(request)
        searched = self._searched.get(request.sequence_id)
        if searched is not None and searched.holds_for(len(request.token_ids), num_tokens, self._is_adaptive):
            return searched.choice
        choice = self._search(text, request.token_ids, num_tokens)
        self._searched[request.sequence_id] = _Searched(len(request.token_ids), num_tokens, choice)
        return choice

    def _search(self, text: _Text, token_ids: list[int], num_tokens: int) -> _Choice:
        best = self._best(text.automaton, text.automaton.own_context(), num_tokens, NOTHING)
        for automaton in self._past.automata(text.owner):
            best = self._best(automaton, automaton.context_of(token_ids), num_tokens, best)
        return best

    def _text(self, request: DraftRequest) -> _Text:
        """Up to date. A text that is shorter than before begins anew."""
        text = self._texts.get(request.sequence_id)
        if text is None or text.automaton.num_tokens > len(request.token_ids):
            automaton = SuffixAutomaton(self._config.max_context)
            origin = request.request
            text = _Text(automaton, (origin.tenant, origin.salt), len(origin.prompt_token_ids), [])
            self._texts[request.sequence_id] = text
        text.follow(request.token_ids)
        return text

    def _best(self, automaton: SuffixAutomaton, context: Context, num_tokens: int, best: _Choice) -> _Choice:
        """The continuation of this context or a shorter one with more expected tokens than `best`, or that."""
        while (allowed := self._allowed(context, num_tokens)) > best.continuation.expected:  # no share is above 1
            found = automaton.continuation(context, allowed, self._config.min_probability)
            if found.expected > best.continuation.expected:
                best = _Choice(found, context, automaton)
            context = automaton.shorter(context)
        return best

    def _allowed(self, context: Context, num_tokens: int) -> int:
        if not context.num_tokens:
            return 0
        return min(num_tokens, max(1, int(self._config.tokens_per_match * context.num_tokens)))
