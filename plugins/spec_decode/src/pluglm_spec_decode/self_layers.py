"""The `self_layers` drafter: the target's own first layers, with its head behind them, continue each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from pluglm.kernel.core import Chunk
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm.kernel.interfaces.target import Target
from pluglm_spec_decode.picking import Drafted, DrawingDrafter, DrawsConfig, LastProposals, pick

# R: rows with logits, V: the target's logits


class SelfLayersConfig(DrawsConfig):
    """num_layers: how many of the target's layers draft."""

    num_layers: int = Field(ge=1)


class SelfLayersDrafter(DrawingDrafter):
    """Early exit: the hidden states behind the first layers go straight to the final norm and the head.

    It has no weights and no KV of its own: of the tokens before, these layers' keys and values are the target's. What
    it writes for its drafts lies where the target will write the same, and one batched call a draft is all it costs.
    A sequence gets no draft while the KV pool has no room for it (counted in `num_exhausted`).

    Source of the method: LayerSkip (Elhoushi et al., 2024, arXiv 2404.16710), which trains models for it; Draft &
    Verify (Zhang et al., 2023, arXiv 2309.08168), which skips layers of models as they are.
    """

    interface_version = 2
    Config = SelfLayersConfig

    def __init__(self, config: SelfLayersConfig, context: BuildContext) -> None:
        """Raises PluginError when the target has no layer behind the last of them."""
        super().__init__(config)
        if context.target is None:
            raise PluginError("drafter 'self_layers' drafts with the target itself, and there is none in this context")
        self._target: Target = context.target
        self._target.use_first_layers(config.num_layers)
        self._num_tokens, self._draws, self._width = config.num_tokens, config.draws, context.spec.vocab_size
        self._num_ids = min(context.tokenizer.vocab_size, context.spec.vocab_size)  # the others mean nothing
        self._proposals = LastProposals()
        self.num_exhausted = 0

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        wanted = [self._num_wanted(one) for one in requests]
        asked = [pair for pair in zip(requests, wanted, strict=True) if pair[1] > 0]
        new = [
            Drafted.of(one, num, self._draws)
            for one, num in asked
            if len(self._proposals.proposal(one, num).token_ids) < num
        ]
        if new:
            self._draft(new)
        for one in new:
            self._proposals.keep(one)
        return [self._proposals.proposal(one, num) for one, num in zip(requests, wanted, strict=True)]

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self._proposals.pop(sequence_id)

    def _release(self, sequence_id: int) -> None:
        self._proposals.pop(sequence_id)

    def _num_wanted(self, request: DraftRequest) -> int:
        return min(self._num_tokens, request.max_tokens) if request.token_ids else 0

    def _draft(self, new: list[Drafted]) -> None:
        """The newest token, then draft after draft but the last, which is never fed back."""
        room = {one.sequence_id: len(one.token_ids) + one.num_wanted - 1 for one in new}
        with self._target.room(room) as roomy:
            self.num_exhausted += len(new) - len(roomy)
            running = [one for one in new if one.sequence_id in roomy]
            for index in range(max((one.num_wanted for one in running), default=0)):
                drafting = [one for one in running if one.num_wanted > index]
                if not drafting:
                    break
                chunks = [
                    Chunk(one.sequence_id, (one.drafts or one.token_ids)[-1:], len(one.token_ids) - 1 + index)
                    for one in drafting
                ]
                logits_RV = self._target.run_first(chunks)[:, : self._num_ids]
                pick(dict(enumerate(drafting)), logits_RV, self._width)
