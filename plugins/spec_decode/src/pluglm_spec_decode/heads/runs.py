"""Runs blocks of a loaded head over flat batches of entries, and cuts long stretches of entries into such batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

import torch

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm.kernel.interfaces.services import Runner
from pluglm.kernel.interfaces.target import FedModel, Target
from pluglm_spec_decode.picking import Drafted

# T: entries of the batch, R: rows asked for, n: entries of one sequence, D: hidden size


class Blocks(FedModel, Protocol):
    """A loaded head. block: the one that the next run computes."""

    block: int


class _LoadedRunner(Runner, Protocol):
    model: Blocks


@dataclass(slots=True)
class HeadJob(Drafted):
    """One sequence in one proposal. Its entries are those of the positions start .. stop of the text.

    start: position whose feature makes the head's entry 0. first: the first entry to compute; those before have KV.
    features_nD: of the target, positions first .. stop, in the run's dtype.
    """

    start: int = 0
    first: int = 0
    features_nD: torch.Tensor = field(default_factory=partial(torch.empty, 0))

    @property
    def stop(self) -> int:
        """The newest token has no feature yet."""
        return len(self.token_ids) - 1

    def tokens(self, first: int, stop: int) -> list[int]:
        """Of these places of the text, drafts behind it. Behind the last draft stands that again.

        Entries with such a token are made anew before anything is drafted with them.
        """
        num_known = len(self.token_ids)
        known = self.token_ids[first:stop] + self.drafts[max(0, first - num_known) : max(0, stop - num_known)]
        last = (self.drafts or self.token_ids)[-1]
        return known + [last] * (stop - first - len(known))


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries first .. stop of a job, computed in one batch."""

    job: HeadJob
    first: int
    stop: int

    @property
    def ends(self) -> bool:
        return self.stop == self.job.stop

    @property
    def features(self) -> torch.Tensor:
        """Of its entries, [n, D], in the run's dtype."""
        return self.job.features_nD[self.first - self.job.first : self.stop - self.job.first]

    def chunk(self, ahead: int) -> Chunk:
        """An entry takes the token that comes `ahead` places behind its feature's."""
        new = self.job.tokens(self.first + ahead, self.stop + ahead)
        return Chunk(self.job.sequence_id, new, self.first - self.job.start)


def pieces(jobs: Sequence[HeadJob], most: int, tail: int) -> Iterator[list[Piece]]:
    """Batches of at most `most` entries. The last `tail` of a job, 1 to most, are in one piece."""
    done = [(job, job.first) for job in jobs]
    while done:
        room, batch, behind = most, list[Piece](), list[tuple[HeadJob, int]]()
        for job, first in done:
            left = job.stop - first
            num = left if left <= room else max(0, min(room, left - tail))
            room -= num
            if num:
                batch.append(Piece(job, first, first + num))
            if num < left:
                behind.append((job, first + num))
        yield batch
        done = behind


class HeadRuns:
    """Calls run one block of a head over a batch. runner: of the loaded head. dtype: the run's, of features."""

    def __init__(self, runner: Runner, target: Target, dtype: torch.dtype) -> None:
        self._runner, self._target, self._dtype = runner, target, dtype
        self._blocks = cast(_LoadedRunner, runner).model

    def __call__(
        self,
        block: int,
        chunks: Sequence[Chunk],
        features_TD: torch.Tensor,
        *,
        all_rows: bool = False,
        copies: BlockCopies = (),
    ) -> torch.Tensor:
        """Predicted features of each chunk's last entry, or of all entries, in the run's dtype.

        chunks: the tokens of entries, behind so many that have KV in this block. features_TD: beside these tokens.
        """
        inputs = replace(self._runner.make_input(chunks), copies=copies)
        if all_rows:
            inputs = replace(inputs, logit_rows_R=torch.arange(len(features_TD)))
        self._blocks.block = block
        self._blocks.feed = lambda token_ids_T: torch.cat((self._target.embed(token_ids_T), features_TD), -1)
        return self._runner.run(inputs).to(self._dtype)
