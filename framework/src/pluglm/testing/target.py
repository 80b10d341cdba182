"""A Target for drafters under test: everything it lends is a table over the committed text and what was run behind it.

A drafter that runs tokens at the wrong place, or goes on from stale hidden states, gets other rows, so its mistake
shows in its proposals. What it may not do at all is refused by the checks of a run's own target.
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
from pluglm.target.lending import LentTarget
from pluglm.testing.runner import table_row, table_state

# R: rows with logits, n: tokens of one sequence, D: hidden size, V: the target's logits


class TableTarget(LentTarget):
    """head: what `build_head` gives, for the drafters that ask for one.

    without_room: sequences that the KV pool has no room for, for the test to set.
    """

    def __init__(self, spec: ModelSpec, head: Callable[[str], Runner] | None = None) -> None:
        super().__init__(spec, "the drafter", head or _no_head, patience_s=1)
        self.without_room: frozenset[int] = frozenset()
        self._texts: dict[int, list[int]] = {}
        self._stored: dict[int, list[int]] = {}  # inside `room`: what the first layers have stored, by sequence
        self._starts: dict[int, int] = {}  # of the hidden states that were not taken yet
        generator = torch.Generator().manual_seed(11)
        self._states_SD = torch.randn((997, spec.hidden_size), generator=generator)
        self._rows_DV = torch.randn((spec.hidden_size, spec.vocab_size), generator=generator)

    @contextmanager
    def lent(self, requests: Sequence[DraftRequest]) -> Iterator[None]:
        """Their texts are the committed ones."""
        self._texts = {one.sequence_id: list(one.token_ids) for one in requests}
        with super().lent(requests):
            yield

    def skip(self, sequence_id: int, stop: int) -> None:
        """Of positions before `stop` there are no hidden states, as when their KV was adopted. Later ones are there."""
        self._starts[sequence_id] = stop

    def forget(self, sequence_id: int) -> None:
        """Its hidden states are there from the first token again."""
        self._starts.pop(sequence_id, None)

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The hidden states of a text, [n, D], for references in tests."""
        return self._states_SD[[table_state(token_ids[: position + 1]) for position in range(len(token_ids))]]

    def _extend(self, wanted: Mapping[int, int]) -> frozenset[int]:
        roomy = frozenset(wanted) - self.without_room
        self._stored = {sequence_id: self._texts[sequence_id][:-1] for sequence_id in roomy}
        return roomy

    def _trim(self, kept: Mapping[int, int]) -> None:
        self._stored = {}

    def _run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        for one in chunks:
            self._stored[one.sequence_id][one.num_computed :] = one.token_ids
        states = [table_state(self._stored[one.sequence_id]) for one in chunks]
        return torch.stack([table_row(state, self.spec.vocab_size) for state in states])

    def _take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        start = self._starts.get(sequence_id, 0)
        if start >= stop:
            return None
        self._starts[sequence_id] = stop
        return HiddenRows(start, self.states(self._texts[sequence_id][:stop])[start:])

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self._states_SD[token_ids_T % len(self._states_SD)]

    def _logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD @ self._rows_DV


def _no_head(path: str) -> Runner:
    raise ValueError("give TableTarget the head that the drafter asks for")


class ToldDrafter(Drafter):
    """A drafter that is lent its TableTarget while it proposes, and that was built."""

    interface_version = DRAFTER_VERSION

    def __init__(self, drafter: Drafter, target: TableTarget) -> None:
        self._drafter, self.target = drafter, target
        target.end_building()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        with self.target.lent(requests):
            return self._drafter.propose(requests)

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self._drafter.observe(sequence_id, num_accepted, token_ids)

    def release(self, sequence_id: int) -> None:
        self.target.forget(sequence_id)
        self._drafter.release(sequence_id)
