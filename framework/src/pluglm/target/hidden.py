"""Hidden states of the tokens that a run computed, kept by sequence until a drafter takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.kv import KVManager, KVStore
from pluglm.kernel.interfaces.model import Model
from pluglm.kernel.interfaces.target import HiddenRows, OpenBackend
from pluglm.kernel.runner import ModelRunner

# T: tokens of the batch, n: tokens of one sequence, D: hidden size


@dataclass(slots=True)
class _Kept:
    """Rows of the positions start .. stop of one sequence, [n, D] each part, in their order."""

    start: int
    stop: int
    parts: list[torch.Tensor]

    def cut(self, stop: int) -> None:
        """Leave what lies before `stop`, which is not before the start."""
        while self.stop > stop:
            last = self.parts.pop()
            self.stop -= len(last)
            if self.stop < stop:
                self.parts.append(last[: stop - self.stop])
                self.stop = stop


class HiddenStates:
    """Rows of consecutive positions of each sequence; what was computed anew replaces what was there."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    @torch.inference_mode()  # outside of it a copy of a single row takes a tenth of a millisecond
    def note(self, segments: Sequence[Segment], hidden_TD: torch.Tensor) -> None:
        """The rows of a batch. Those of a sequence that do not follow on what is kept of it take its place."""
        for one in segments:
            rows_nD = hidden_TD[one.query_start : one.query_start + one.num_query].clone()  # not the whole batch
            self._put(one.sequence_id, _Kept(one.num_context, one.num_context + one.num_query, [rows_nD]))

    def take_over(self, sequence_id: int, branch_id: int) -> None:
        """The branch's rows are the sequence's from where they begin, and all that it has there."""
        self._put(sequence_id, self._kept.pop(branch_id))

    def take(self, sequence_id: int, stop: int) -> HiddenRows | None:
        """Rows of positions before `stop`, all the way to it; others stay, and all do when those are not complete."""
        kept = self._kept.get(sequence_id)
        if kept is None or not kept.start < stop <= kept.stop:
            return None
        rows_nD = torch.cat(kept.parts)  # of one part too: a copy that is made here can be trained with
        num_taken = stop - kept.start
        # what is behind is cut, or replaced, when the next step computes it
        self._kept[sequence_id] = _Kept(stop, kept.stop, [rows_nD[num_taken:].clone()])
        return HiddenRows(kept.start, rows_nD[:num_taken])

    def _put(self, sequence_id: int, new: _Kept) -> None:
        kept = self._kept.get(sequence_id)
        if kept is None or not kept.start <= new.start <= kept.stop:
            self._kept[sequence_id] = new
            return
        kept.cut(new.start)
        kept.parts += new.parts
        kept.stop = new.stop

    def drop(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)

    def keep_only(self, is_live: Callable[[int], bool]) -> None:
        """Forgets the rows of all other sequence ids."""
        self._kept = {sequence_id: kept for sequence_id, kept in self._kept.items() if is_live(sequence_id)}


class RecordingRunner(ModelRunner):
    """A ModelRunner that keeps the hidden states of every token it computes."""

    def __init__(self, backend: Backend, model: Model, attention: object, kv: KVManager, store: KVStore) -> None:
        super().__init__(backend, model, attention, kv, store)
        self.hidden = HiddenStates()

    def run(self, inputs: ModelInput) -> torch.Tensor:
        logits_RV, hidden_TD = cast(OpenBackend, self.backend).execute_open(
            self.model, inputs, self.attention, self.store
        )
        self.hidden.note(inputs.segments, hidden_TD)
        self.hidden.keep_only(self._holds)
        return logits_RV

    def take_over(self, sequence_id: int, branch_id: int) -> None:
        self.hidden.take_over(sequence_id, branch_id)

    def _holds(self, sequence_id: int) -> bool:
        """Whoever ended or was preempted has no table."""
        try:
            self.kv.block_table(sequence_id)
        except KeyError:
            return False
        return True
