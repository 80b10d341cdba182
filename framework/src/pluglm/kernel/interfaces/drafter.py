"""The contract of a drafter: guesses of the next tokens. Verification is the kernel's, so a drafter cannot be lossy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pluglm.kernel.interfaces.component import Component

DRAFTER_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One sequence to draft for. token_ids: prompt and committed output; at most max_tokens may be proposed."""

    sequence_id: int
    token_ids: list[int]
    max_tokens: int


class Drafter(Component, Protocol):
    """Proposals are fixed (no draw whose probabilities verification would need), in the target's token ids."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each request 0 to max_tokens ids, in order. Proposing twice without observe gives equal ids."""
        ...

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """A step committed `token_ids`, the first num_accepted of them drafted. Called for all that go on."""
        ...

    def release(self, sequence_id: int) -> None:
        """The sequence ended or lost its KV; forget its state. Called for every id that was ever shown, maybe twice."""
        ...
