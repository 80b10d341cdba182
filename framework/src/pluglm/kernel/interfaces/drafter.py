"""The contract of a drafter: guesses of the next tokens, and the rows they were drawn from. The kernel verifies them.

Under `reproducible` a drafter cannot change the output. `token` and `block` rely on its rows, which no one can check in
a run: a drafter that states others than it drew from is lossy there, and the contract kit is what finds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component
from pluglm.verification.checking import MAX_BRANCHES as MAX_BRANCHES
from pluglm.verification.randomness import Purpose, window_uniforms

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import Request

DRAFTER_VERSION = 2
ROWS = "drafter:rows"  # what it proposes for sampled requests is drawn, and comes with its rows
SHARES = "drafter:shares"  # proposals may depend on the texts of other sequences
ADAPTS = "drafter:adapts"  # how many tokens are proposed depends on how many were accepted before

# k: drafts of one proposal, V: the target's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One sequence to draft for: a lane of a request. Written by the engine, read by the drafter.

    token_ids: prompt and committed output, a list of the drafter's own; at most max_tokens may be proposed.
    request.params: a drafter may shape its rows by them or not; any rows are legal that it really draws from.
    request.tenant, request.salt: what it learns of one sequence may serve others of the same two, and no others.
    """

    sequence_id: int
    request: Request
    lane: int
    token_ids: list[int]
    max_tokens: int

    @property
    def position(self) -> int:
        """Index of the output token that the first draft is for."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def coins(self, count: int) -> array[float]:
        """The uniforms in (0, 1) that `count` drafts are drawn with. Nothing else may be drawn with them."""
        return window_uniforms(self.request.seed, self.lane, self.position, count, Purpose.PROPOSE)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Drafts of one sequence, in the target's token ids.

    rows_kV: float32 probabilities on the target's device, [len(token_ids), V]: the rows that token_ids were drawn from,
    each given the drafts before it, everything done to them before the draw included. The sum of each, in float64, is
    within 1e-5 of 1, no entry is negative or NaN, and its own draft has more than 0; other rows fail the request by the
    drafter's name. None: the drafts were chosen, not drawn, or their rows are unknown.
    branches: other ways on from the committed text, MAX_BRANCHES at most, which may begin as token_ids or one another
    do; only without rows_kV. They are verified as far as the step has tokens and KV left over, in order, and the
    longest way that is right is committed. Each takes a token more than it has, since it computes the newest one of the
    text again; one that adds nothing to those before it is left out.
    """

    token_ids: list[int]
    rows_kV: torch.Tensor | None = None
    branches: list[list[int]] = field(default_factory=list)


class Drafter(Component, Protocol):
    """Tags that it may declare: ROWS, SHARES, ADAPTS.

    How many tokens it proposes may depend on everything but the draw of a token that it leaves out: it may end behind a
    token it drew, and never drop one.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """For each request 0 to max_tokens drafts, in order; draws take DraftRequest.coins and nothing else.

        Proposing twice without observe gives equal ids and rows.
        """
        ...

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """A step committed `token_ids`, the first num_accepted of them drafted. Called for all that go on."""
        ...

    def release(self, sequence_id: int) -> None:
        """The sequence ended or lost its KV; forget its state. Called for every id that was ever shown, maybe twice."""
        ...


@runtime_checkable
class BoundedDrafter(Protocol):
    """Optional ability: says how much it proposes at most, so that the memory plan counts no more rows than that.

    Without it every token of a step counts as one whose logits are computed.
    """

    @classmethod
    def most_tokens(cls, config: Any) -> int:
        """Tokens of one proposal at most, those of branches too, whatever max_tokens allows. Called before building."""
        ...
