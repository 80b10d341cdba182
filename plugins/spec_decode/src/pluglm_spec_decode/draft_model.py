"""The `draft_model` drafter: a second, smaller model continues each sequence. Verification is the kernel's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import Field

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm.kernel.interfaces.component import BuildContext, Capabilities
from pluglm.kernel.interfaces.drafter import ROWS, DraftRequest, Proposal
from pluglm.verification.drawing import inverse_cdf
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter
from pluglm_spec_decode.draft_cache import DraftCache
from pluglm_spec_decode.same_vocabulary import require_same_vocabulary

# R: rows with logits, k: drafts of a sequence, V: the target's logits


class DraftModelConfig(AdaptiveConfig):
    """model: a path, a name that an installed package registers, or a hub id. It runs in the target's dtype.

    draws: drafts for sampled requests are drawn at their temperature, which verification by token and block needs.
    """

    model: str = Field(min_length=1)
    draws: bool = False


@dataclass(slots=True)
class _Job:
    """One sequence in one proposal. drafts grows to num_wanted; num_computed counts token_ids with stored KV.

    coins: one for each draft that is drawn from a row, none when the most likely token is taken.
    """

    sequence_id: int
    token_ids: list[int]
    num_wanted: int
    num_computed: int
    coins: Sequence[float] = ()
    temperature: float = 0.0
    drafts: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_reserved(self) -> int:
        """The last draft is never fed back, so it needs no KV."""
        return len(self.token_ids) + self.num_wanted - 1


@dataclass(frozen=True, slots=True)
class _Made:
    num_known: int
    drafts: list[int]
    rows_kV: torch.Tensor | None


class DraftModelDrafter(AdaptiveDrafter):
    """Drafts what a smaller model would say: one batched call a position, after those that catch up with the text.

    That is what it finds most likely; or with `draws`, for a request that is sampled, a draw at its temperature.
    A sequence gets no draft when it is longer than the draft model's context, or when the draft model's KV has no
    room for it (counted in `num_exhausted`).
    """

    interface_version = 2
    Config = DraftModelConfig

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        of_length = super().capabilities(config)
        return replace(of_length, provides=of_length.provides | ({ROWS} if config.draws else frozenset()))

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
        self._proposals: dict[int, _Made] = {}

    @property
    def num_exhausted(self) -> int:
        """Proposals that were left empty for want of KV, since the start."""
        return self._cache.num_exhausted

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        jobs = [job for job in map(self._job, requests) if job is not None]
        self._run_jobs(jobs)
        for job in jobs:
            if job.drafts:
                rows_kV = torch.stack(job.rows) if job.rows else None
                self._proposals[job.sequence_id] = _Made(len(job.token_ids), job.drafts, rows_kV)
        return [self._proposed(request) for request in requests]

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Keeps the KV of the accepted drafts: they are committed now. The rest is computed when next proposing."""
        proposal = self._proposals.pop(sequence_id, None)
        if proposal is not None:
            self._cache.trim(sequence_id, proposal.num_known + num_accepted)

    def _release(self, sequence_id: int) -> None:
        self._proposals.pop(sequence_id, None)
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
        num_usable = self._cache.num_usable(request.sequence_id, request.token_ids)
        job = _Job(request.sequence_id, list(request.token_ids), num_wanted, num_usable)
        if self._draws and not request.request.params.greedy:
            job.coins, job.temperature = request.coins(num_wanted), request.request.params.temperature
        return job

    def _proposed(self, request: DraftRequest) -> Proposal:
        """From the last proposal, while nothing was committed since: drawn again, near ties could fall otherwise."""
        proposal = self._proposals.get(request.sequence_id)
        if proposal is None or proposal.num_known != len(request.token_ids):
            return Proposal([])
        count = max(self._num_wanted(request), 0)
        return Proposal(proposal.drafts[:count], None if proposal.rows_kV is None else proposal.rows_kV[:count])

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
            self._draft(dict(enumerate(drafting)), self._run(chunks))
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
            logits_RV = self._run(chunks, copies)
            self._draft({row: job for row, job in enumerate(fed) if job.num_computed == len(job.token_ids)}, logits_RV)
            copies = ()

    def _run(self, chunks: Sequence[Chunk], copies: BlockCopies = ()) -> torch.Tensor:
        """logits_RV after the last token of each chunk, of ids that mean something."""
        return self._runner.run(replace(self._runner.make_input(chunks), copies=copies))[:, : self._num_ids]

    def _draft(self, jobs: Mapping[int, _Job], logits_RV: torch.Tensor) -> None:
        """The next draft of each job, by row: the most likely token, or a draw whose row is kept with it."""
        best = logits_RV.argmax(dim=-1).tolist()
        for row, job in jobs.items():
            if not job.coins:
                job.drafts.append(best[row])
        drawn = {row: job for row, job in jobs.items() if job.coins}
        if not drawn:
            return
        some_RV, device = logits_RV[list(drawn)], logits_RV.device
        warmth_R1 = torch.tensor([[job.temperature] for job in drawn.values()], device=device)
        # The largest goes first: divided by a tiny temperature it would overflow.
        probs_RV = ((some_RV - some_RV.amax(-1, keepdim=True)) / warmth_R1).softmax(-1)
        probs_RV = torch.nn.functional.pad(probs_RV, (0, self._width - probs_RV.shape[1]))
        coins = [job.coins[len(job.drafts)] for job in drawn.values()]
        ids = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=device)).tolist()
        for job, row_V, token_id in zip(drawn.values(), probs_RV, ids, strict=True):
            job.drafts.append(token_id)
            job.rows.append(row_V)
