"""The `eagle_head` drafter: one trained block is applied again and again, each time to the feature it said last."""

from __future__ import annotations

import torch

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm_spec_decode.heads.drafting import HeadConfig, HeadDrafter
from pluglm_spec_decode.heads.runs import HeadJob, pieces

# T: entries of the batch, R: rows with logits, D: hidden size


class EagleHeadDrafter(HeadDrafter):
    """One batched call for what was committed since, which gives the first draft, then one for each further draft.

    Source of the method: EAGLE (Li et al., 2024, arXiv 2401.15077), with one line of drafts instead of a tree.
    """

    kind = "eagle"
    Config = HeadConfig

    def _num_entries(self, num_known: int, num_wanted: int) -> int:
        """The last draft is never fed back."""
        return num_known + num_wanted - 1

    def _run_jobs(self, jobs: list[HeadJob], copies: BlockCopies) -> None:
        said: dict[int, torch.Tensor] = {}  # feature_D of the newest entry, by sequence
        for batch in pieces(jobs, self._max_step_tokens, tail=1):
            features_TD = torch.cat([piece.features for piece in batch])
            features_RD = self._run_block(0, [piece.chunk(1) for piece in batch], features_TD, copies=copies)
            self._say({row: piece.job for row, piece in enumerate(batch) if piece.ends}, features_RD, said)
            copies = ()
        for index in range(1, max(job.num_wanted for job in jobs)):
            drafting = [job for job in jobs if job.num_wanted > index]
            if not drafting:
                break
            chunks = [Chunk(job.sequence_id, job.drafts[-1:], job.stop - job.start + index - 1) for job in drafting]
            features_RD = self._run_block(0, chunks, torch.stack([said[job.sequence_id] for job in drafting]))
            self._say(dict(enumerate(drafting)), features_RD, said)

    def _say(self, jobs: dict[int, HeadJob], features_RD: torch.Tensor, said: dict[int, torch.Tensor]) -> None:
        self._pick(jobs, features_RD)
        said |= {job.sequence_id: features_RD[row] for row, job in jobs.items()}
