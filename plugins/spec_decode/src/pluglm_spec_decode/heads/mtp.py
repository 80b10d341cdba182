"""The `mtp_head` drafter: trained blocks one after another, each of which looks one token further ahead."""

from __future__ import annotations

import torch
from pydantic import Field

from pluglm.kernel.core import BlockCopies
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm_spec_decode.heads.drafting import HeadConfig, HeadDrafter
from pluglm_spec_decode.heads.runs import HeadJob, Piece, pieces
from pluglm_spec_decode.heads.settings import DRAFTERS

# T: entries of the batch, D: hidden size


class MtpHeadConfig(HeadConfig):
    """num_tokens: blocks that are run, which is as many as tokens are proposed at most."""

    num_tokens: int = Field(default=1, ge=1, le=32)


class MtpHeadDrafter(HeadDrafter):
    """One batched call a block, over what was committed since and a few entries before.

    Block d takes the feature that block d - 1 said at a position (the target's own for block 0) and the token d + 1
    places on. So the last entries of block d are made of d drafts, and are made anew when the text has grown over them.

    Source of the method: multi-token prediction of DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2).
    """

    kind = "mtp"
    Config = MtpHeadConfig

    def __init__(self, config: MtpHeadConfig, context: BuildContext) -> None:
        """Raises PluginError also for more tokens than a step computes."""
        if config.num_tokens > context.max_step_tokens:
            raise PluginError(
                f"drafter '{DRAFTERS[self.kind]}': num_tokens is {config.num_tokens}, more than the "
                f"{context.max_step_tokens} tokens of a step; lower num_tokens, or raise engine.max_step_tokens"
            )
        super().__init__(config, context)

    @classmethod
    def _require_fit(cls, spec: ModelSpec, config: HeadConfig) -> None:
        num_blocks = len(spec.layers)
        if config.num_tokens > num_blocks:
            raise PluginError(
                f"drafter '{DRAFTERS[cls.kind]}': num_tokens is {config.num_tokens} and {config.model} has "
                f"{num_blocks} blocks; set num_tokens to {num_blocks} or less"
            )

    @property
    def _num_anew(self) -> int:
        return self._num_tokens - 1

    def _num_entries(self, num_known: int, num_wanted: int) -> int:
        return num_known

    def _run_jobs(self, jobs: list[HeadJob], copies: BlockCopies) -> None:
        for batch in pieces(jobs, self._max_step_tokens, tail=max(1, self._num_anew)):
            features_TD = torch.cat([piece.features for piece in batch])
            for block in range(self._num_tokens):
                chunks = [piece.chunk(block + 1) for piece in batch]
                features_TD = self._run_block(block, chunks, features_TD, all_rows=True, copies=copies)
                self._pick(_ending(batch, block), features_TD)
                copies = ()


def _ending(batch: list[Piece], block: int) -> dict[int, HeadJob]:
    """Jobs whose last entry is in the batch and who want a draft of this block, by the row of that entry."""
    found, stop = dict[int, HeadJob](), 0
    for piece in batch:
        stop += piece.stop - piece.first
        if piece.ends and piece.job.num_wanted > block:
            found[stop - 1] = piece.job
    return found
