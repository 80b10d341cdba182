"""Base of the drafters with a trained head: which features they have, which entries have KV, who may be drafted for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from pluglm.kernel.core import BlockCopies
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.target import HiddenRows, Target
from pluglm_spec_decode.draft_cache import DraftCache
from pluglm_spec_decode.heads.runs import HeadJob, HeadRuns
from pluglm_spec_decode.heads.settings import DRAFTERS, read_fitting_head, read_head
from pluglm_spec_decode.picking import DrawingDrafter, DrawsConfig, LastProposals, pick

# R: rows with logits, n: tokens of one sequence, D: hidden size, V: the target's logits


class HeadConfig(DrawsConfig):
    """model: the local folder of a head that was trained for this run's model. It runs in that model's dtype."""

    model: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Trail:
    """Entries start .. stop have KV, made of the target's own features; rows_nD are the last of these features."""

    start: int
    stop: int
    rows_nD: torch.Tensor


class HeadDrafter(DrawingDrafter):
    """Drafts with a head that takes, for each position, the target's feature there and the embedding of the next token.

    A feature is the target's hidden state before its final norm; drafts are what the target's own head says of those
    that are predicted. Positions of the head count from the first feature that it got: where the target computed no
    hidden states (a cached prefix, KV that was loaded, a fork), the head begins behind them. A sequence gets no draft
    while its last feature is missing, or when there is no KV for it (counted in `num_exhausted`). Where it is longer
    than the head's context, the head begins anew with the newest features.
    """

    interface_version = 2
    kind: ClassVar[str]

    def __init__(self, config: HeadConfig, context: BuildContext) -> None:
        """Raises PluginError for a head of another kind or another model, before any weights are read."""
        super().__init__(config)
        if context.target is None:
            raise PluginError(
                f"drafter '{DRAFTERS[self.kind]}' drafts with the target, and there is none in this context"
            )
        spec = read_fitting_head(config.model, self.kind, context.spec)
        self._num_tokens, self._draws, self._width = config.num_tokens, config.draws, context.spec.vocab_size
        self._num_ids = min(context.tokenizer.vocab_size, context.spec.vocab_size)  # the others mean nothing
        self._max_step_tokens, self._max_position = context.max_step_tokens, spec.max_position
        self._require_fit(spec, config)
        self._target: Target = context.target
        self._target.use_hidden_states()
        runner = self._target.build_head(config.model)
        self._run_block = HeadRuns(runner, self._target, getattr(torch, context.dtype))
        self._cache = DraftCache(runner.kv)
        self._trails: dict[int, _Trail] = {}
        self._proposals = LastProposals()

    @classmethod
    def check_files(cls, config: HeadConfig) -> None:
        """What the constructor refuses by the head's config.json alone."""
        cls._require_fit(read_head(config.model, cls.kind)[0], config)

    @property
    def num_exhausted(self) -> int:
        """Proposals that were left empty for want of KV, since the start."""
        return self._cache.num_exhausted

    @property
    def _num_anew(self) -> int:
        """How many of the last entries are computed again when new ones come."""
        return 0

    @classmethod
    def _require_fit(cls, spec: ModelSpec, config: HeadConfig) -> None:
        """PluginError when the head cannot draft as configured."""

    @abstractmethod
    def _num_entries(self, num_known: int, num_wanted: int) -> int:
        """Entries that are stored for num_wanted drafts behind num_known entries."""

    @abstractmethod
    def _run_jobs(self, jobs: list[HeadJob], copies: BlockCopies) -> None:
        """Computes all entries of the jobs and their drafts; the first run does the block copies."""

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        wanted = [min(self._num_tokens, one.max_tokens) for one in requests]
        jobs = [self._job(one, num) for one, num in zip(requests, wanted, strict=True) if self._is_new(one, num)]
        self._draft([job for job in jobs if job is not None])
        return [self._proposals.proposal(one, num) for one, num in zip(requests, wanted, strict=True)]

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Gives back the KV of entries made of predicted features: those of the target take their place."""
        trail = self._trails.get(sequence_id)
        if self._proposals.pop(sequence_id) is not None and trail is not None:
            self._cache.trim(sequence_id, trail.stop - trail.start)

    def _release(self, sequence_id: int) -> None:
        self._proposals.pop(sequence_id)
        self._trails.pop(sequence_id, None)
        self._cache.release(sequence_id)

    def _is_new(self, request: DraftRequest, num_wanted: int) -> bool:
        """Whether something is wanted that was not proposed already."""
        return num_wanted > 0 and len(self._proposals.proposal(request, num_wanted).token_ids) < num_wanted

    def _job(self, request: DraftRequest, num_wanted: int) -> HeadJob | None:
        """None without the last feature. A call that fails leaves no trail, as its features are gone."""
        job = HeadJob.of(request, num_wanted, self._draws)
        trail, found = self._trails.pop(job.sequence_id, None), self._target.take_hidden(job.sequence_id, job.stop)
        entries = self._entries(trail, found, job.stop)
        if entries is not None:
            job.start, job.first, job.features_nD = entries
            while job.num_wanted and self._num_entries(job.stop - job.start, job.num_wanted) > self._max_position:
                job.num_wanted -= 1
        if entries is None or not job.num_wanted:
            self._cache.release(job.sequence_id)
            return None
        return job

    def _entries(
        self, trail: _Trail | None, found: HiddenRows | None, stop: int
    ) -> tuple[int, int, torch.Tensor] | None:
        """(start, first, features_nD) of a job. Features that do not follow on the trail's begin a new one."""
        if found is None:
            if trail is None or trail.stop != stop:
                return None
            return trail.start, stop - len(trail.rows_nD), trail.rows_nD
        if trail is None or found.start != trail.stop:
            return found.start, found.start, found.rows_nD
        num_anew = min(self._num_anew, len(trail.rows_nD))
        again_nD = trail.rows_nD[len(trail.rows_nD) - num_anew :]
        return trail.start, trail.stop - num_anew, torch.cat((again_nD, found.rows_nD))

    def _draft(self, jobs: list[HeadJob]) -> None:
        if not jobs:
            return
        roomy, copies = self._cache.reserve({
            job.sequence_id: (job.first - job.start, self._num_entries(job.stop - job.start, job.num_wanted))
            for job in jobs
        })  # fmt: skip
        running = [job for job in jobs if job.sequence_id in roomy]
        for job in jobs:
            if job.sequence_id not in roomy:
                self._cache.release(job.sequence_id)
        if running:
            self._run_jobs(running, copies)
        for job in running:
            self._proposals.keep(job)
            num_entries = self._num_entries(job.stop - job.start, job.num_wanted)
            self._cache.note(job.sequence_id, job.tokens(job.start + 1, job.start + 1 + num_entries))
            last_nD = job.features_nD[-max(1, self._num_anew) :].clone()  # not the whole prompt
            self._trails[job.sequence_id] = _Trail(job.start, job.stop, last_nD)

    def _pick(self, jobs: Mapping[int, HeadJob], features_RD: torch.Tensor) -> None:
        """The next draft of each job, by its row of predicted features."""
        if jobs:
            picked_RD = features_RD[list(jobs)] if len(jobs) < len(features_RD) else features_RD
            logits_RV = self._target.logits(picked_RD)[:, : self._num_ids]
            pick(dict(enumerate(jobs.values())), logits_RV, self._width)
