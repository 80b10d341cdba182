"""Checks of the branches that a drafter proposes: what the kernel would refuse, and that they are no accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pluglm.kernel.interfaces.drafter import Drafter, Proposal
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.drafter_requests import draft_request
from pluglm.verification.checking import problem_of_proposal

Make = Callable[[], Drafter]


def branch_checks(make: Make, texts: Sequence[list[int]], vocab_size: int) -> Iterator[Check]:
    """A drafter that proposes no branches passes."""
    yield make_check(branches_are_usable, make, texts, vocab_size)
    yield make_check(branches_are_the_same_again, make, texts)


def branches_are_usable(make: Make, texts: Sequence[list[int]], vocab_size: int) -> None:
    """Ways of max_tokens at most, ids of the target, no rows beside them."""
    for max_tokens in (0, 1, 2, 7):
        for made in _proposals(make(), texts, max_tokens):
            if made.branches != []:
                problem = problem_of_proposal(made, max_tokens, vocab_size, vocab_size, "cpu")
                expect(problem is None, f"branches that can be verified, for {max_tokens} tokens", problem)


def branches_are_the_same_again(make: Make, texts: Sequence[list[int]]) -> None:
    """Without an observe."""
    drafter = make()
    first, second = (_branches(drafter, texts) for _ in range(2))
    expect(first == second, f"equal branches without an observe, {first}", second)


def _proposals(drafter: Drafter, texts: Sequence[list[int]], max_tokens: int) -> list[Proposal]:
    ask = partial(draft_request, max_tokens=max_tokens)
    return drafter.propose([ask(text, sequence_id=place) for place, text in enumerate(texts)])


def _branches(drafter: Drafter, texts: Sequence[list[int]]) -> list[list[list[int]]]:
    return [made.branches for made in _proposals(drafter, texts, 4)]
