"""A Target for drafters under test: everything it lends is a table over the committed text and what was run behind it.

A drafter that runs tokens at the wrong place, or goes on from stale hidden states, gets other rows, so its mistake
shows in its proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from pluglm.kernel.core import Chunk
from pluglm.kernel.interfaces.drafter import DRAFTER_VERSION, Drafter, DraftRequest, Proposal
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.services import Runner
from pluglm.kernel.interfaces.target import HiddenRows
from pluglm.testing.runner import table_row, table_state

# R: rows with logits, n: tokens of one sequence, D: hidden size, V: the target's logits


class TableTarget:
    """head: what `build_head` gives, for the drafters that ask for one."""

    def __init__(self, spec: ModelSpec, head: Callable[[str], Runner] | None = None) -> None:
        self._spec, self._head = spec, head
        self._texts: dict[int, list[int]] = {}
        self._run: dict[int, list[int]] = {}  # inside `room`: what the first layers have stored, by sequence
        self._taken: dict[int, int] = {}
        generator = torch.Generator().manual_seed(11)
        self._states_SD = torch.randn((997, spec.hidden_size), generator=generator)
        self._rows_DV = torch.randn((spec.hidden_size, spec.vocab_size), generator=generator)

    def know(self, requests: Sequence[DraftRequest]) -> None:
        """These are the committed texts."""
        self._texts.update((one.sequence_id, list(one.token_ids)) for one in requests)

    def forget(self, sequence_id: int) -> None:
        self._taken.pop(sequence_id, None)

    def use_first_layers(self, num_layers: int) -> None:
        """Any number will do."""

    def use_hidden_states(self) -> None:
        """They are always there."""

    def build_head(self, path: str) -> Runner:
        if self._head is None:
            raise ValueError("give TableTarget the head that the drafter asks for")
        return self._head(path)

    @contextmanager
    def room(self, wanted: Mapping[int, int]) -> Iterator[frozenset[int]]:
        self._run = {sequence_id: self._texts[sequence_id][:-1] for sequence_id in wanted}
        yield frozenset(wanted)
        self._run = {}

    def run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        rows = []
        for one in chunks:
            stored = self._run[one.sequence_id]
            if not len(self._texts[one.sequence_id]) - 1 <= one.num_computed <= len(stored):
                raise ValueError(f"sequence {one.sequence_id} was run at {one.num_computed}, {len(stored)} are stored")
            stored[one.num_computed :] = one.token_ids
            rows.append(table_row(table_state(stored), self._spec.vocab_size))
        return torch.stack(rows)

    def take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        start, text = self._taken.get(sequence_id, 0), self._texts[sequence_id]
        if not start < stop < len(text):
            return None
        self._taken[sequence_id] = stop
        states = [table_state(text[: position + 1]) for position in range(start, stop)]
        return HiddenRows(start, self._states_SD[states])

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self._states_SD[token_ids_T % len(self._states_SD)]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD @ self._rows_DV


class ToldDrafter(Drafter):
    """A drafter whose TableTarget is told of the texts that it is asked about."""

    interface_version = DRAFTER_VERSION

    def __init__(self, drafter: Drafter, target: TableTarget) -> None:
        self._drafter, self._target = drafter, target

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._target.know(requests)
        return self._drafter.propose(requests)

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self._drafter.observe(sequence_id, num_accepted, token_ids)

    def release(self, sequence_id: int) -> None:
        self._target.forget(sequence_id)
        self._drafter.release(sequence_id)
