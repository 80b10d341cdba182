"""The kit of drafters is tested: a plain lookup passes, and for every check one broken drafter fails only that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import ADAPTS, SHARES, DraftRequest, Proposal
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.drafter import drafter_checks
from pluglm.testing.drafter_target import target_checks


class LookupDrafter:
    """Proposes what followed the last token where it occurred before. It remembers what it saw, for fixtures."""

    interface_version = 2
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.seen: dict[int, int] = {}  # sequence id -> times shown
        self.outcomes: dict[int, int] = {}  # sequence id -> observed so far

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            self.seen[request.sequence_id] = self.seen.get(request.sequence_id, 0) + 1
        return [Proposal(self.one(request)) for request in requests]

    def one(self, request: DraftRequest) -> list[int]:
        text = request.token_ids
        for index in range(len(text) - 2, -1, -1):
            if text[index] == text[-1]:
                return text[index + 1 :][: request.max_tokens]
        return []

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self.outcomes[sequence_id] = self.outcomes.get(sequence_id, 0) + 1

    def release(self, sequence_id: int) -> None:
        self.seen.pop(sequence_id, None)
        self.outcomes.pop(sequence_id, None)


def changed(change: Any) -> type[LookupDrafter]:
    """LookupDrafter whose proposals pass through change(drafter, request, proposal)."""

    class Broken(LookupDrafter):
        def one(self, request: DraftRequest) -> list[int]:
            return list(change(self, request, super().one(request)))

    return Broken


class DropsEmptyOnes(LookupDrafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        found = super().propose(requests)
        return (
            [one for one in found if one.token_ids] if len(requests) == 4 and requests[0].token_ids == [17] else found
        )


class TrimsTheText(LookupDrafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        found = super().propose(requests)
        for request in requests:
            del request.token_ids[-1:]
        return found


class NeedsAToken(LookupDrafter):
    def one(self, request: DraftRequest) -> list[int]:
        return super().one(request) if request.token_ids[-1] >= 0 else []


class ReleasesOnce(LookupDrafter):
    """Forgets what it did release when the id is shown again."""

    def release(self, sequence_id: int) -> None:
        del self.seen[sequence_id]


class KeepsTheOldText(LookupDrafter):
    """Looks up the first text ever shown under an id when another one of the same length comes."""

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.texts: dict[int, list[int]] = {}

    def one(self, request: DraftRequest) -> list[int]:
        first = self.texts.setdefault(request.sequence_id, list(request.token_ids))
        same_length = len(first) == len(request.token_ids)
        return super().one(replace(request, token_ids=first if same_length else request.token_ids))


class FirstComesFirst(LookupDrafter):
    """Has time for a lookup only until the sequence with the highest id was served."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        found = super().propose(requests)
        backwards = len(requests) == 4 and requests[0].sequence_id == 3 and requests[-1].sequence_id == 0
        return (
            [*found[:1], *(Proposal([]) for _ in found[1:])] if backwards and len(requests[0].token_ids) == 4 else found
        )


class SharesOutcomes(LookupDrafter):
    """Proposes less once many outcomes, of any sequence, were seen."""

    def one(self, request: DraftRequest) -> list[int]:
        found = super().one(request)
        return found[:1] if sum(self.outcomes.values()) > 8 else found


def one_too_many(drafter: Any, request: DraftRequest, proposal: list[int]) -> list[int]:
    return [*proposal, proposal[-1]] if request.max_tokens == 2 and len(proposal) == 2 else proposal


def at_least_one(drafter: Any, request: DraftRequest, proposal: list[int]) -> list[int]:
    return proposal if request.max_tokens else [1]


def past_the_vocabulary(drafter: Any, request: DraftRequest, proposal: list[int]) -> list[int]:
    return [one + 200 if one in (200, 261) else one for one in proposal]


def only_the_first_time(drafter: Any, request: DraftRequest, proposal: list[int]) -> list[int]:
    asked_again = drafter.seen[request.sequence_id] > 1 and not drafter.outcomes
    return [] if asked_again and request.token_ids == [7, 7, 7, 7] and request.sequence_id == 3 else proposal


class CautiousAfterRefusal(LookupDrafter):
    """A refusal of every draft spoils the next proposal."""

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.refused: set[int] = set()

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        super().observe(sequence_id, num_accepted, token_ids)
        if num_accepted == 0 and token_ids[-1] == 250:
            self.refused.add(sequence_id)

    def one(self, request: DraftRequest) -> list[int]:
        return [1] if request.sequence_id in self.refused else super().one(request)


class Branches(LookupDrafter):
    """Beside what it looked up a token that it did not."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            replace(made, branches=self.branches(one))
            for one, made in zip(requests, super().propose(requests), strict=True)
        ]

    def branches(self, request: DraftRequest) -> list[list[int]]:
        return [[1][: request.max_tokens]]


class LongBranches(Branches):
    def branches(self, request: DraftRequest) -> list[list[int]]:
        return [[1] * 8 if request.max_tokens == 7 else []]


class ForgetfulBranches(Branches):
    """Only when it is first asked."""

    def branches(self, request: DraftRequest) -> list[list[int]]:
        return super().branches(request) if self.seen[request.sequence_id] == 1 else []


BROKEN: dict[str, type[LookupDrafter]] = {
    "proposals_fit_max_tokens": changed(one_too_many),
    "no_room_means_no_proposal": changed(at_least_one),
    "ids_are_the_targets": changed(past_the_vocabulary),
    "one_proposal_a_request": DropsEmptyOnes,
    "proposing_twice_gives_the_same": changed(only_the_first_time),
    "requests_are_not_changed": TrimsTheText,
    "short_texts_are_legal": NeedsAToken,
    "release_may_come_twice": ReleasesOnce,
    "released_ids_start_afresh": KeepsTheOldText,
    "outcomes_leave_no_trace": CautiousAfterRefusal,
    "order_of_requests_does_not_matter": FirstComesFirst,
    "sequences_do_not_mix": SharesOutcomes,
    "branches_are_usable": LongBranches,
    "branches_are_the_same_again": ForgetfulBranches,
}
OF_TARGETS = {check.name for check in target_checks(lambda: None, adapts=False, shares=False)}  # type: ignore[arg-type, return-value]


def test_a_plain_drafter_passes() -> None:
    for cls in (LookupDrafter, Branches):
        report = run_checks(drafter_checks(cls))
        assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in drafter_checks(LookupDrafter)} == COMMON | set(BROKEN) | OF_TARGETS


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_fails_exactly_its_check(name: str) -> None:
    report = run_checks(drafter_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


class Bounded(LookupDrafter):
    @classmethod
    def most_tokens(cls, config: Any) -> int:
        return 5

    def one(self, request: DraftRequest) -> list[int]:
        return super().one(request)[:5]


class BeyondItsBound(Bounded):
    def one(self, request: DraftRequest) -> list[int]:
        return LookupDrafter.one(self, request)[:6]


class BoundedByAFloat(Bounded):
    @classmethod
    def most_tokens(cls, config: Any) -> Any:
        return 5.0


def test_one_that_states_a_bound_keeps_to_it() -> None:
    report = run_checks(drafter_checks(Bounded))
    assert report.ok, str(report)
    names = {outcome.name for outcome in report.outcomes}
    assert names == COMMON | set(BROKEN) | OF_TARGETS | {"proposals_stay_below_the_bound"}
    for broken in (BeyondItsBound, BoundedByAFloat):
        assert run_checks(drafter_checks(broken)).failed == ("proposals_stay_below_the_bound",)


class Shares(SharesOutcomes):
    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({SHARES}))


def test_one_that_shares_is_not_asked_to_be_as_alone() -> None:
    report = run_checks(drafter_checks(Shares))
    assert report.ok, str(report)
    unasked = {"sequences_do_not_mix", "released_ids_start_afresh", "a_full_pool_costs_others_nothing"}
    assert {outcome.name for outcome in report.outcomes} == (COMMON | set(BROKEN) | OF_TARGETS) - unasked


class Adapts(CautiousAfterRefusal):
    """A refusal of every draft makes the next proposal shorter."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({ADAPTS}))

    def one(self, request: DraftRequest) -> list[int]:
        if request.token_ids[-1:] != [250]:
            return LookupDrafter.one(self, request)
        return [1, 2, 3][: min(request.max_tokens, 1 if request.sequence_id in self.refused else 3)]


class AdaptsWhat(Adapts):
    """Not only how much."""

    def one(self, request: DraftRequest) -> list[int]:
        return [7] if request.sequence_id in self.refused else super().one(request)


def test_one_that_adapts_may_change_the_length_alone() -> None:
    assert "outcomes_leave_no_trace" in run_checks(drafter_checks(OnlyShorter)).failed
    assert run_checks(drafter_checks(Adapts)).failed == ()
    assert run_checks(drafter_checks(AdaptsWhat)).failed == ("prefixes_after_outcomes",)


class OnlyShorter(Adapts):
    """It does not say so."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()
