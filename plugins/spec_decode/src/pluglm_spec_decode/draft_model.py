"""The `draft_model` drafter: a second, smaller model continues each sequence. Verification is the kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm_spec_decode.draft_cache import DraftCache
from pluglm_spec_decode.picking import Drafted, DrawingDrafter, DrawsConfig, LastProposals, pick
from pluglm_spec_decode.same_vocabulary import require_same_vocabulary

# R: rows with logits, k: drafts of a sequence, V: the target's logits


class DraftModelConfig(DrawsConfig):
    """model: a path, a name that an installed package registers, or a hub id. It runs in the target's dtype."""

    model: str = Field(min_length=1)


@dataclass(slots=True)
class _Job(Drafted):
    """num_computed counts token_ids with stored KV."""

    num_computed: int = 0

    @property
    def num_reserved(self) -> int:
        """The last draft is never fed back, so it needs no KV."""
        return len(self.token_ids) + self.num_wanted - 1


class DraftModelDrafter(DrawingDrafter):
    """Drafts what a smaller model would say: one batched call a position, after those that catch up with the text.

    That is what it finds most likely; or with `draws`, for a request that is sampled, a draw at its temperature.
    A sequence gets no draft when it is longer than the draft model's context, or when the draft model's KV has no
    room for it (counted in `num_exhausted`).
    """

    interface_version = 2
    Config = DraftModelConfig

    @classmethod
    def named_models(cls, config: DraftModelConfig) -> tuple[str, ...]:
        return (config.model,)

    def __init__(self, config: DraftModelConfig, context: BuildContext) -> None:
        """Raises PluginError when the two models' token ids do not mean the same."""
        super().__init__(config)
        self._num_tokens, self._draws, self._width = config.num_tokens, config.draws, context.spec.vocab_size
        self._max_step_tokens = context.max_step_tokens
        self._runner, tokenizer = context.build_runner(config.model)
        require_same_vocabulary(context.tokenizer.to_json(), tokenizer.to_json(), config.model)
        # Rows of a head beyond the tokenizer, or beyond the target's head, name no token.
        self._num_ids = min(tokenizer.vocab_size, context.spec.vocab_size)
        self._cache = DraftCache(self._runner.kv)
        self._proposals = LastProposals()

    @property
    def num_exhausted(self) -> int:
        """Proposals that were left empty for want of KV, since the start."""
        return self._cache.num_exhausted

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        jobs = [job for job in map(self._job, requests) if job is not None]
        self._run_jobs(jobs)
        for job in jobs:
            self._proposals.keep(job)
        return [self._proposed(request) for request in requests]

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Keeps the KV of the accepted drafts: they are committed now. The rest is computed when next proposing."""
        num_known = self._proposals.pop(sequence_id)
        if num_known is not None:
            self._cache.trim(sequence_id, num_known + num_accepted)

    def _release(self, sequence_id: int) -> None:
        self._proposals.pop(sequence_id)
        self._cache.release(sequence_id)

    def _num_wanted(self, request: DraftRequest) -> int:
        num_known = len(request.token_ids)
        num_positions = self._runner.spec.max_position - num_known + 1  # the last draft is not fed back
        return min(self._num_tokens, request.max_tokens, num_positions) if num_known else 0

    def _job(self, request: DraftRequest) -> _Job | None:
        """None when there is nothing to compute: nothing is wanted, or it was proposed already."""
        num_wanted = self._num_wanted(request)
        if num_wanted < 1 or len(self._proposed(request).token_ids) == num_wanted:
            return None
        job = _Job.of(request, num_wanted, self._draws)
        job.num_computed = self._cache.num_usable(request.sequence_id, request.token_ids)
        return job

    def _proposed(self, request: DraftRequest) -> Proposal:
        return self._proposals.proposal(request, self._num_wanted(request))

    def _run_jobs(self, jobs: list[_Job]) -> None:
        wanted = {job.sequence_id: (job.num_computed, job.num_reserved) for job in jobs}
        if not wanted:
            return
        roomy, copies = self._cache.reserve(wanted)
        running = [job for job in jobs if job.sequence_id in roomy]
        self._catch_up(running, copies)
        for position in range(max((job.num_wanted for job in running), default=0) - 1):
            drafting = [job for job in running if job.num_wanted > position + 1]
            if not drafting:
                break
            chunks = [Chunk(job.sequence_id, job.drafts[-1:], len(job.token_ids) + position) for job in drafting]
            pick(dict(enumerate(drafting)), self._run(chunks), self._width)
        for job in running:
            self._cache.note(job.sequence_id, job.token_ids + job.drafts[:-1])

    def _catch_up(self, jobs: list[_Job], copies: BlockCopies) -> None:
        """Computes what was committed since, at most max_step_tokens a call, and every job's first draft."""
        while behind := [job for job in jobs if job.num_wanted and not job.drafts]:
            room, chunks, fed = self._max_step_tokens, list[Chunk](), list[_Job]()
            for job in behind:
                new = job.token_ids[job.num_computed : job.num_computed + room]
                if new:
                    chunks.append(Chunk(job.sequence_id, new, job.num_computed))
                    fed.append(job)
                    room -= len(new)
                    job.num_computed += len(new)
            logits_RV = self._run(chunks, copies)
            done = {row: job for row, job in enumerate(fed) if job.num_computed == len(job.token_ids)}
            pick(done, logits_RV, self._width)
            copies = ()

    def _run(self, chunks: Sequence[Chunk], copies: BlockCopies = ()) -> torch.Tensor:
        """logits_RV after the last token of each chunk, of ids that mean something."""
        return self._runner.run(replace(self._runner.make_input(chunks), copies=copies))[:, : self._num_ids]
