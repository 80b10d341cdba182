"""Which sequences may be drafted for, how far, and whether what a drafter proposed is usable."""

from __future__ import annotations

from collections.abc import Collection

from pluglm.kernel.core import Budget, Sequence
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest


def requests(running: Collection[Sequence], budget: Budget) -> list[DraftRequest]:
    """Sequences with one pending token, each with room for its draft in the step's budget and its own limits.

    The token after the last draft is drawn too, so one less than the tokens still wanted is asked for.
    """
    ready = [
        sequence
        for sequence in running
        if sequence.walk is None and len(sequence.token_ids) - sequence.num_computed == 1
    ]
    spare = max(0, budget.num_tokens - len(running)) // max(1, len(ready))
    room = [min(spare, sequence.request.max_new_tokens - sequence.num_output - 1) for sequence in ready]
    return [
        DraftRequest(sequence_id=sequence.sequence_id, token_ids=list(sequence.token_ids), max_tokens=most)
        for sequence, most in zip(ready, room, strict=True)
        if most > 0
    ]


def ask(drafter: Drafter, asked: list[DraftRequest], vocab_size: int) -> list[list[int] | str]:
    """One draft per request, or what is wrong with the answer."""
    proposals = drafter.propose(asked)
    if not isinstance(proposals, list) or len(proposals) != len(asked):
        raise ValueError(f"propose must return one list for each of {len(asked)} requests")
    return [
        _problem(one, proposal, vocab_size) or list(proposal) for one, proposal in zip(asked, proposals, strict=True)
    ]


def _problem(request: DraftRequest, proposal: object, vocab_size: int) -> str | None:
    if not isinstance(proposal, list):
        return f"proposed {type(proposal).__name__}, not a list of token ids"
    if len(proposal) > request.max_tokens:
        return f"proposed {len(proposal)} tokens where {request.max_tokens} were allowed"
    wrong = [token for token in proposal if not isinstance(token, int) or not 0 <= token < vocab_size]
    return f"proposed token id {wrong[0]!r}, outside 0..{vocab_size - 1}" if wrong else None
