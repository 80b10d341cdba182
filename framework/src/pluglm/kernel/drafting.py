"""Which sequences may be drafted for, how far, and whether what a drafter proposed is usable."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pluglm.kernel.core import Budget, Sequence
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest, Proposal
from pluglm.kernel.parts import Parts
from pluglm.kernel.quick_new import quick_new
from pluglm.verification.checking import problem_of_proposal

new_request: Callable[..., DraftRequest] = quick_new(DraftRequest)  # by position, as its names take long


def requests(running: Collection[Sequence], budget: Budget) -> list[DraftRequest]:
    """Sequences with one pending token, each with room for its draft in the step's budget and its own limits.

    The token after the last draft is drawn too, so one less than the tokens still wanted is asked for.
    """
    ready = [one for one in running if one.walk is None and one.drafts_within(1) == 0]
    spare = max(0, budget.num_tokens - len(running)) // max(1, len(ready))
    return [
        new_request(one.sequence_id, one.request, one.lane, one.token_ids[:], most)
        for one in ready
        if (most := min(spare, one.request.max_new_tokens - one.num_output - 1)) > 0
    ]


def ask(drafter: Drafter, asked: list[DraftRequest], parts: Parts) -> list[Proposal | str]:
    """One proposal per request, with lists of ids of its own, or what is wrong with it."""
    given = drafter.propose(asked)
    if not isinstance(given, list) or len(given) != len(asked):
        raise ValueError(f"propose must return one Proposal for each of {len(asked)} requests")
    return [_usable(one, answer, parts) for one, answer in zip(asked, given, strict=True)]


def _usable(request: DraftRequest, proposal: object, parts: Parts) -> Proposal | str:
    ids = getattr(proposal, "token_ids", proposal)
    if not isinstance(proposal, Proposal) or not isinstance(ids, list):
        return f"proposed {type(ids).__name__}, not a Proposal with a list of token ids"
    width, device = parts.runner.spec.vocab_size, parts.runner.backend.device
    wrong = problem_of_proposal(proposal, request.max_tokens, parts.num_ids, width, device)
    return wrong or Proposal(list(ids), proposal.rows_kV, [list(one) for one in proposal.branches])
