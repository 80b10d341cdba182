"""The kit of plans made ahead is tested: a sound policy passes, and for every check a broken one fails only that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from pluglm.backends.fake import FakeBackend
from pluglm.kernel.core import Event, RequestView, StepView
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.backend import backend_checks
from pluglm.testing.check import run_checks
from pluglm.testing.plans_ahead import plans_ahead_checks
from pluglm.testing.scheduling_policy import scheduling_policy_checks


class Turns(SchedulingPolicy):
    """Those that run take turns at being the first, so that how often it was asked matters."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.num_plans = self.num_told = 0

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        self.num_plans += 1
        return self.turned(view, self.num_plans)

    def turned(self, view: StepView, number: int) -> list[int]:
        ids = [one.sequence_id for one in view.running]
        start = number % max(1, len(ids))
        return ids[start:] + ids[:start]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [one.sequence_id for one in view.waiting]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: Any) -> Stop | Skip | Victims:
        others = [one.sequence_id for one in view.running if one.arrival_s > request.arrival_s]
        return Victims(tuple(reversed(others))) if others else Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def checkpoint(self) -> Callable[[], object]:
        num_plans = self.num_plans

        def restore() -> None:
            self.num_plans = num_plans

        return restore


class TakesNothingBack(Turns):
    def checkpoint(self) -> Callable[[], object]:
        return tuple


class ReadsTheClock(Turns):
    def order_running(self, view: StepView) -> Iterable[int]:
        return self.turned(view, int(100 * view.now_s))


class AsksTheCache(Turns):
    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [one.sequence_id for one in sorted(view.waiting, key=lambda one: -one.cached_prefix())]


class CountsEvents(Turns):
    def order_running(self, view: StepView) -> Iterable[int]:
        return self.turned(view, self.num_told)

    def on_event(self, event: Event) -> None:
        self.num_told += 1


class CountsArrivals(CountsEvents):
    def on_event(self, event: Event) -> None:
        """Of these it counts none."""

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        self.num_told += 1
        return Accept()


def failing(cls: type[Any]) -> list[str]:
    checks = plans_ahead_checks(lambda: cls(ComponentConfig(), None), PolicyScheduler, is_policy=True)
    report = run_checks(checks)
    return list(report.failed)


BROKEN = {
    TakesNothingBack: "a_step_that_does_not_come_leaves_no_trace",
    ReadsTheClock: "the_clock_is_not_read",
    AsksTheCache: "cached_prefixes_are_not_asked_for",
    CountsEvents: "events_and_arrivals_change_no_plan",
    CountsArrivals: "events_and_arrivals_change_no_plan",
}


def test_a_sound_policy_passes() -> None:
    assert failing(Turns) == []


@pytest.mark.parametrize("cls", BROKEN)
def test_a_broken_one_fails_its_own_check(cls: type[Any]) -> None:
    assert failing(cls) == [BROKEN[cls]]


def test_the_kit_of_policies_has_these_checks_for_those_with_the_ability() -> None:
    names = {check.name for check in scheduling_policy_checks(Turns)}
    assert set(BROKEN.values()) <= names
    assert not set(BROKEN.values()) & {check.name for check in scheduling_policy_checks(SchedulingPolicy)}


class Launching(FakeBackend):
    def launch(self, model: Any, inputs: Any, attention: Any, kv: Any) -> Callable[[], torch.Tensor]:
        return lambda: self.execute(model, inputs, attention, kv)


class Forgetful(Launching):
    """Computes before it writes: the launch loses what it was given."""

    def launch(self, model: Any, inputs: Any, attention: Any, kv: Any) -> Callable[[], torch.Tensor]:
        logits_RV = self.execute(model, inputs, attention, kv)
        kv.keys(0).fill_(-1)
        return lambda: logits_RV


@pytest.mark.parametrize(("cls", "fails"), [(Launching, False), (Forgetful, True)])
def test_launches_are_held_to_execute(cls: type[Any], fails: bool) -> None:
    (check,) = [one for one in backend_checks(cls) if one.name == "a_launch_gives_what_execute_gives"]
    assert run_checks([check]).ok != fails
