"""The `draft_model` drafter: a second, smaller model continues each sequence greedily. Verification is the kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest
from pluglm_spec_decode.draft_cache import DraftCache
from pluglm_spec_decode.same_vocabulary import require_same_vocabulary

# R: rows with logits, V: vocabulary


class DraftModelConfig(ComponentConfig):
    """model: a path, a name that an installed package registers, or a hub id. It runs in the target's dtype."""

    model: str = Field(min_length=1)
    num_tokens: int = Field(default=4, ge=1, le=32)


@dataclass(slots=True)
class _Job:
    """One sequence in one proposal. drafts grows to num_wanted; num_computed counts token_ids with stored KV."""

    sequence_id: int
    token_ids: list[int]
    num_wanted: int
    num_computed: int
    drafts: list[int] = field(default_factory=list)

    @property
    def num_reserved(self) -> int:
        """The last draft is never fed back, so it needs no KV."""
        return len(self.token_ids) + self.num_wanted - 1


@dataclass(frozen=True, slots=True)
class _Proposal:
    num_known: int
    drafts: list[int]


class DraftModelDrafter(Drafter):
    """Drafts what a smaller model would say: one batched call a position, after those that catch up with the text.

    A sequence gets no draft when it is longer than the draft model's context, or when the draft model's KV has no
    room for it (counted in `num_exhausted`).
    """

    interface_version = 1
    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, context: BuildContext) -> None:
        """Raises PluginError when the two models' token ids do not mean the same."""
        self._num_tokens = config.num_tokens
        self._max_step_tokens = context.max_step_tokens
        self._runner, tokenizer = context.build_runner(config.model)
        require_same_vocabulary(context.tokenizer.to_json(), tokenizer.to_json(), config.model)
        # Rows of a head beyond the tokenizer, or beyond the target's head, name no token.
        self._num_ids = min(tokenizer.vocab_size, context.spec.vocab_size)
        self._cache = DraftCache(self._runner.kv)
        self._proposals: dict[int, _Proposal] = {}

    @property
    def num_exhausted(self) -> int:
        """Proposals that were left empty for want of KV, since the start."""
        return self._cache.num_exhausted

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        jobs = [job for job in map(self._job, requests) if job is not None]
        self._run_jobs(jobs)
        for job in jobs:
            if job.drafts:
                self._proposals[job.sequence_id] = _Proposal(len(job.token_ids), job.drafts)
        return [self._proposed(request) for request in requests]

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Keeps the KV of the accepted drafts: they are committed now. The rest is computed when next proposing."""
        proposal = self._proposals.pop(sequence_id, None)
        if proposal is not None:
            self._cache.trim(sequence_id, proposal.num_known + num_accepted)

    def release(self, sequence_id: int) -> None:
        self._proposals.pop(sequence_id, None)
        self._cache.release(sequence_id)

    def _num_wanted(self, request: DraftRequest) -> int:
        num_known = len(request.token_ids)
        num_positions = self._runner.spec.max_position - num_known + 1  # the last draft is not fed back
        return min(self._num_tokens, request.max_tokens, num_positions) if num_known else 0

    def _job(self, request: DraftRequest) -> _Job | None:
        """None when there is nothing to compute: nothing is wanted, or it was proposed already."""
        num_wanted = self._num_wanted(request)
        if num_wanted < 1 or len(self._proposed(request)) == num_wanted:
            return None
        num_usable = self._cache.num_usable(request.sequence_id, request.token_ids)
        return _Job(request.sequence_id, list(request.token_ids), num_wanted, num_usable)

    def _proposed(self, request: DraftRequest) -> list[int]:
        """From the last proposal, while nothing was committed since: drawn again, near ties could fall otherwise."""
        proposal = self._proposals.get(request.sequence_id)
        if proposal is None or proposal.num_known != len(request.token_ids):
            return []
        return proposal.drafts[: max(self._num_wanted(request), 0)]

    def _run_jobs(self, jobs: list[_Job]) -> None:
        wanted = {job.sequence_id: (job.num_computed, job.num_reserved) for job in jobs}
        if not wanted:
            return
        roomy, copies = self._cache.reserve(wanted)
        running = [job for job in jobs if job.sequence_id in roomy]
        self._catch_up(running, copies)
        for position in range(max((job.num_wanted for job in running), default=0) - 1):
            drafting = [job for job in running if job.num_wanted > position + 1]
            chunks = [Chunk(job.sequence_id, job.drafts[-1:], len(job.token_ids) + position) for job in drafting]
            for job, token_id in zip(drafting, self._most_likely(chunks), strict=True):
                job.drafts.append(token_id)
        for job in running:
            self._cache.note(job.sequence_id, job.token_ids + job.drafts[:-1])

    def _catch_up(self, jobs: list[_Job], copies: BlockCopies) -> None:
        """Computes what was committed since, at most max_step_tokens a call, and every job's first draft."""
        while behind := [job for job in jobs if not job.drafts]:
            room, chunks, fed = self._max_step_tokens, list[Chunk](), list[_Job]()
            for job in behind:
                new = job.token_ids[job.num_computed : job.num_computed + room]
                if new:
                    chunks.append(Chunk(job.sequence_id, new, job.num_computed))
                    fed.append(job)
                    room -= len(new)
                    job.num_computed += len(new)
            for job, token_id in zip(fed, self._most_likely(chunks, copies), strict=True):
                if job.num_computed == len(job.token_ids):
                    job.drafts.append(token_id)
            copies = ()

    def _most_likely(self, chunks: Sequence[Chunk], copies: BlockCopies = ()) -> list[int]:
        """The token most likely after the last one of each chunk."""
        logits_RV = self._runner.run(replace(self._runner.make_input(chunks), copies=copies))
        token_ids: list[int] = logits_RV[:, : self._num_ids].argmax(dim=-1).tolist()
        return token_ids
