"""The `universal` drafter: a draft model of any vocabulary, whose text is encoded again for the target.

The method is universal assisted generation (Timor et al., 2025, arXiv 2502.05202, string-level matching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter
from pluglm_spec_decode.draft_model import DraftModelConfig, DraftModelDrafter
from pluglm_spec_decode.reencoding import Reencoder


class UniversalConfig(AdaptiveConfig):
    """model: a path, a name that an installed package registers, or a hub id. It runs in the target's dtype."""

    model: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the draft model was asked, and its answer."""

    num_known: int  # the draft's ids of the text
    num_drafts: int


class UniversalDrafter(AdaptiveDrafter):
    """Drafts what a model with another tokenizer says. Its drafts are chosen, never drawn: their rows mean other ids.

    The draft model sees the text without the target's special tokens, so a chat template's marks are missing. The text
    is encoded anew for each proposal, at about a microsecond for each of its tokens.
    """

    interface_version = 2
    Config = UniversalConfig
    may_rest = True

    @classmethod
    def named_models(cls, config: UniversalConfig) -> tuple[str, ...]:
        return (config.model,)

    def __init__(self, config: UniversalConfig, context: BuildContext) -> None:
        super().__init__(config)
        runner, tokenizer = context.build_runner(config.model)
        own = replace(context, tokenizer=tokenizer, spec=runner.spec, build_runner=lambda model: (runner, tokenizer))
        # It is built beside its own tokenizer, so it drafts in its own ids.
        self._inner = DraftModelDrafter(DraftModelConfig(model=config.model, num_tokens=config.num_tokens), own)
        self._reencoder = Reencoder(context.tokenizer, tokenizer)
        self._num_ids = min(context.tokenizer.vocab_size, context.spec.vocab_size)
        self._asked: dict[int, _Asked] = {}

    @property
    def num_exhausted(self) -> int:
        """Proposals that were left empty for want of KV, since the start."""
        return self._inner.num_exhausted

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        texts = [self._reencoder.to_draft(request.token_ids) for request in requests]
        for request, text in zip(requests, texts, strict=True):
            asked = self._asked.get(request.sequence_id)
            if asked is not None and asked.num_known != len(text):
                self._settle(request.sequence_id)
        found = self._inner.propose(
            [replace(request, token_ids=text) for request, text in zip(requests, texts, strict=True)]
        )
        proposals = []
        for request, text, made in zip(requests, texts, found, strict=True):
            self._asked[request.sequence_id] = _Asked(len(text), len(made.token_ids))
            most = max(0, min(self._most, request.max_tokens))  # one of its tokens may be several here
            token_ids = self._reencoder.to_target(request.token_ids, text, made.token_ids)[:most]
            ends = [place for place, one in enumerate(token_ids) if one >= self._num_ids]
            proposals.append(Proposal(token_ids[: ends[0]] if ends else token_ids))
        return proposals

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self._settle(sequence_id)

    def _release(self, sequence_id: int) -> None:
        self._asked.pop(sequence_id, None)
        self._inner.release(sequence_id)

    def _settle(self, sequence_id: int) -> None:
        """Forget the last answer. Its KV is kept: what the new text does not begin with is computed again."""
        asked = self._asked.pop(sequence_id, None)
        if asked is not None:
            self._inner.observe(sequence_id, asked.num_drafts, ())
