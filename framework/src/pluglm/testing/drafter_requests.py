"""What a drafter is asked, for its kit and for tests of one: requests for texts, and the ids of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pluglm.kernel.core import Request
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest, Proposal
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import expect

MAX_TOKENS = 4
# texts that repeat themselves, so that lookups find something; the last token of each was seen before
TEXTS = ([9, 5, 6, 7, 8, 5, 6, 7], [1, 2, 3, 1, 2, 3, 1, 2], [40, 41, 42, 43, 44, 45, 40, 41], [7, 7, 7, 7])


def draft_request(
    token_ids: Sequence[int], *, sequence_id: int = 0, max_tokens: int = MAX_TOKENS, lane: int = 0, **fields: Any
) -> DraftRequest:
    """For a text that is all prompt, unless fields of the Request (prompt_token_ids, params, ...) say otherwise."""
    defaults: dict[str, Any] = {
        "request_id": f"{sequence_id}",
        "prompt_token_ids": tuple(token_ids),
        "params": SamplingParams(),
        "seed": 7,
        "arrival_s": 0.0,
        "max_new_tokens": max_tokens + 1,
    }
    return DraftRequest(
        sequence_id=sequence_id,
        request=Request(**{**defaults, **fields}),
        lane=lane,
        token_ids=list(token_ids),
        max_tokens=max_tokens,
    )


def ids_of(proposals: Sequence[Proposal]) -> list[list[int]]:
    """The drafts of each proposal; fails where a drafter of version 1 returned lists."""
    for one in proposals:
        expect(isinstance(one, Proposal), "a Proposal for each request from propose()", type(one).__name__)
    return [proposal.token_ids for proposal in proposals]


def ask(drafter: Drafter, *texts: list[int], max_tokens: int = MAX_TOKENS, place: int = 0) -> list[list[int]]:
    """Drafts for texts whose sequence ids are their places, the first one's is `place`."""
    requests = [
        draft_request(text, sequence_id=sequence_id, max_tokens=max_tokens)
        for sequence_id, text in enumerate(texts, start=place)
    ]
    return ids_of(drafter.propose(requests))
