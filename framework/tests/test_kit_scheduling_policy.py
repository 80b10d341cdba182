"""The kit of policies is tested: arrival order passes, and for every check one broken policy fails only that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pluglm.kernel.core import Event, RequestView, StepView
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Reject, Skip, Stop, Victims
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.scheduling_policy import scheduling_policy_checks


class ArrivalPolicy:
    """By arrival, decodes before prompts; whoever is blocked may take the place of later arrivals that run."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.num_calls = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        self.num_calls += 1
        return [one.sequence_id for one in sorted(view.running, key=lambda one: (one.num_pending > 1, rank(one)))]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [one.sequence_id for one in sorted(view.waiting, key=rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop | Skip | Victims:
        later = [one for one in sorted(view.running, key=rank, reverse=True) if rank(one) > rank(request)]
        return Victims(tuple(one.sequence_id for one in later)) if later else Stop()

    def on_event(self, event: Event) -> None:
        return


def rank(request: RequestView) -> tuple[float, int]:
    return request.arrival_s, request.sequence_id


class RejectsInSilence(ArrivalPolicy):
    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Reject("") if num_waiting > 4 else Accept()


class RunsTheWaiting(ArrivalPolicy):
    def order_running(self, view: StepView) -> Iterable[int]:
        return [*super().order_running(view), *super().order_waiting(view)]


class NamesTwice(ArrivalPolicy):
    def order_waiting(self, view: StepView) -> Iterable[int]:
        found = list(super().order_waiting(view))
        return [*found, *found[:1]]


class SharesLessThanNothing(ArrivalPolicy):
    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left if tokens_left != 7 else -1


class WaitsForCompany(ArrivalPolicy):
    """Starts nobody while nothing runs, until somebody has waited for long."""

    def order_waiting(self, view: StepView) -> Iterable[int]:
        patient = not view.running and view.now_s == 2.0
        return [] if patient else super().order_waiting(view)


class AnswersNone(ArrivalPolicy):
    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop | Skip | Victims:
        found = super().on_blocked(view, request, need)
        return None if isinstance(found, Stop) else found  # type: ignore[return-value]


class NamesItself(ArrivalPolicy):
    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop | Skip | Victims:
        found = super().on_blocked(view, request, need)
        return Victims((*found.sequence_ids, request.sequence_id)) if isinstance(found, Victims) else found


class SwapsOut(ArrivalPolicy):
    """In the old words, where nobody acts on them."""

    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop | Skip | Victims:
        found = super().on_blocked(view, request, need)
        wrong: Any = "swap"
        return Victims(found.sequence_ids, wrong) if isinstance(found, Victims) and view.step >= 1000 else found


class TurnsRound(ArrivalPolicy):
    """Round robin that counts its calls instead of events."""

    def order_waiting(self, view: StepView) -> Iterable[int]:
        found = list(super().order_waiting(view))
        return found[self.num_calls % len(found) :] + found[: self.num_calls % len(found)] if found else found


class NeedsTokens(ArrivalPolicy):
    def on_event(self, event: Event) -> None:
        if event.token_ids[0] < 0:
            raise ValueError("negative token")


class NeverForgives(ArrivalPolicy):
    """Who was preempted once gets no tokens any more, except one tenant."""

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return 0 if request.num_preemptions and request.tenant != "lanes" else tokens_left


class OneLaneIsEnough(ArrivalPolicy):
    def order_waiting(self, view: StepView) -> Iterable[int]:
        lanes = {one.sequence_id for one in view.waiting if one.lane == 2}
        return [one for one in super().order_waiting(view) if one not in lanes]


class RemembersEverybody(ArrivalPolicy):
    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.guests: set[str] = set()

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        self.guests.add(request.request_id)
        return Accept()


BROKEN: dict[str, type[ArrivalPolicy]] = {
    "admission_is_answered": RejectsInSilence,
    "running_order_names_running_sequences": RunsTheWaiting,
    "waiting_order_names_waiting_sequences": NamesTwice,
    "share_is_a_count": SharesLessThanNothing,
    "an_idle_engine_gets_work": WaitsForCompany,
    "blocked_requests_get_an_answer": AnswersNone,
    "victims_are_other_running_sequences": NamesItself,
    "victims_have_a_known_mode": SwapsOut,
    "equal_views_equal_answers": TurnsRound,
    "events_are_taken": NeedsTokens,
    "every_request_finishes": NeverForgives,
    "every_lane_finishes": OneLaneIsEnough,
    "memory_does_not_grow_with_requests": RemembersEverybody,
}


def test_a_plain_policy_passes() -> None:
    report = run_checks(scheduling_policy_checks(ArrivalPolicy))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in scheduling_policy_checks(ArrivalPolicy)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_fails_exactly_its_check(name: str) -> None:
    report = run_checks(scheduling_policy_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
