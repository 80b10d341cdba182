"""The contract of a search: no token is drawn; it says which lanes of a request go on, and with which tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

SEARCH_VERSION = 1

# L: lanes, V: vocabulary


@dataclass(frozen=True, slots=True)
class Branch:
    """A lane of the next step: that lane of this step, and one token more."""

    lane: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A result: output tokens, the score it was ranked by, and whether it ended by itself or at the length limit."""

    token_ids: tuple[int, ...]
    score: float
    stopped: bool


class Walk(Protocol):
    """The search of one request. The kernel forks, keeps and drops sequences as it is told."""

    def advance(self, logprobs_LV: torch.Tensor) -> Sequence[Branch]:
        """The lanes to go on with, in order: they are the rows of the next call. The first call has one, the prompt.

        No branch ends the search, at the latest in call number max_tokens.
        logprobs_LV: float32 log-probabilities (nats) of each lane's next token, ids without meaning at -inf.
        """
        ...

    def results(self) -> Sequence[Hypothesis]:
        """num_results of them, best first, of max_tokens each at most. Called once, after advance returned no branch.

        Raises RequestError when so many do not exist.
        """
        ...


class Search(Component, Protocol):
    """Makes walks. Requests ask for it with `search` in their sampling params."""

    def check(self, options: Mapping[str, Any], num_results: int) -> str | None:
        """What is wrong with a request's options, or None. num_results: the n outputs that it wants."""
        ...

    def start(self, options: Mapping[str, Any], num_results: int, max_tokens: int, ignore_eos: bool) -> Walk:
        """A walk of at most max_tokens tokens; with ignore_eos, EOS is a token like any other."""
        ...
