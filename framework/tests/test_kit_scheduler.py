"""The kit of schedulers is tested: a plain one passes, and for every check one broken scheduler fails only that."""

from __future__ import annotations

from typing import Any

import pytest

from pluglm.kernel.core import Budget, PlanItem, RequestView, StepPlan, StepView
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.scheduler import scheduler_checks


class PlainScheduler:
    """First come, first served; the newest running sequence is dropped when blocks run out."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.num_plans = self.num_adopted = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        self.num_plans += 1
        running, left = list(view.running), budget.num_tokens
        items: dict[int, PlanItem] = {}
        preempted: list[int] = []
        for request in view.running:
            while request in running and not self.extend(kv, request, min(left, request.num_pending)):
                victim = running.pop()
                self.drop(kv, victim.sequence_id)
                preempted.append(victim.sequence_id)
                left += items.pop(victim.sequence_id, PlanItem(0, 0)).num_tokens
            if request in running and min(left, request.num_pending) > 0:
                items[request.sequence_id] = PlanItem(request.sequence_id, min(left, request.num_pending))
                left -= min(left, request.num_pending)
        if not preempted:
            self.admit(view, kv, left, self.num_seats(view, budget) - len(running), items)
        if not items and (idle := [one.sequence_id for one in view.waiting[1:] if one.holds_kv]):
            self.drop(kv, idle[-1])
            preempted.append(idle[-1])
        return StepPlan(tuple(items.values()), tuple(preempted))

    def num_seats(self, view: StepView, budget: Budget) -> int:
        return budget.num_seats

    def drop(self, kv: Any, sequence_id: int) -> None:
        kv.release(sequence_id)

    def acquire(self, kv: Any, request: RequestView) -> int:
        if request.holds_kv:
            return 0
        self.num_adopted = int(kv.acquire(request.sequence_id, request.cache_key))
        return self.num_adopted

    def extend(self, kv: Any, request: RequestView, num_tokens: int) -> bool:
        num_computed, self.num_adopted = request.num_computed + self.num_adopted, 0
        try:
            kv.extend(request.sequence_id, num_computed + num_tokens)
        except KVExhausted:
            return False
        return True

    def admit(self, view: StepView, kv: Any, left: int, seats: int, items: dict[int, PlanItem]) -> None:
        for request in view.waiting[: max(seats, 0)]:
            num_tokens = min(left, request.num_pending)
            if num_tokens <= 0:
                return
            num_tokens = min(num_tokens, request.num_pending - self.acquire(kv, request))
            if not self.extend(kv, request, num_tokens):
                if not request.holds_kv:
                    kv.release(request.sequence_id)
                return
            items[request.sequence_id] = PlanItem(request.sequence_id, num_tokens)
            left -= num_tokens


def replans(change: Any) -> type[PlainScheduler]:
    """PlainScheduler whose plan passes through change(view, plan, kv, num_plans)."""

    class Broken(PlainScheduler):
        def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
            found = change(view, super().plan(view, budget, kv), kv, self.num_plans)
            assert isinstance(found, StepPlan)
            return found

    return Broken


def first_item(plan: StepPlan, **changes: Any) -> StepPlan:
    from dataclasses import replace

    return replace(plan, items=(replace(plan.items[0], **changes), *plan.items[1:])) if plan.items else plan


def invents_work(view: StepView, plan: StepPlan, kv: Any, num_plans: int) -> StepPlan:
    return plan if view.running or view.waiting or view.budget.num_seats != 4 else StepPlan((), (1,))


class SpendsTwice(PlainScheduler):
    """Admission gets the whole budget again."""

    def admit(self, view: StepView, kv: Any, left: int, seats: int, items: dict[int, PlanItem]) -> None:
        super().admit(view, kv, view.budget.num_tokens, seats, items)


class OneSeatMore(PlainScheduler):
    def num_seats(self, view: StepView, budget: Budget) -> int:
        return budget.num_seats + 1


def asks_for_too_much(view: StepView, plan: StepPlan, kv: Any, num_plans: int) -> StepPlan:
    """An extra token for a sequence that has the room, within the budget."""
    request = next((one for one in view.running if plan.items and one.sequence_id == plan.items[0].sequence_id), None)
    spent = sum(item.num_tokens for item in plan.items)
    if request is None or spent >= view.budget.num_tokens or (request.num_computed + request.num_pending) % 4 == 0:
        return plan
    return (
        first_item(plan, num_tokens=request.num_pending + 1)
        if plan.items[0].num_tokens == request.num_pending
        else plan
    )


class ForgetsToExtend(PlainScheduler):
    def extend(self, kv: Any, request: RequestView, num_tokens: int) -> bool:
        if request.num_computed and request.num_computed % 4 == 0 and request.num_prompt == request.num_known - 3:
            return True
        return super().extend(kv, request, num_tokens)


def names_waiting_victims(view: StepView, plan: StepPlan, kv: Any, num_plans: int) -> StepPlan:
    waiting = [one.sequence_id for one in view.waiting if one.num_preemptions]
    planned = {item.sequence_id for item in plan.items}
    return StepPlan(plan.items, (*plan.preempted, *(one for one in waiting[-1:] if one not in planned)))


class KeepsVictimsBlocks(PlainScheduler):
    """Drops all but the first block, and takes the table over when the victim returns."""

    def drop(self, kv: Any, sequence_id: int) -> None:
        kv.trim(sequence_id, 1)

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        for request in view.waiting:
            if request.num_preemptions and request.sequence_id in kv.book.tables:
                kv.release(request.sequence_id)
        return super().plan(view, budget, kv)


class SwapsBlocks(PlainScheduler):
    """Releases and acquires a running sequence in one go, which loses what its blocks hold."""

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        for request in view.running[1:2]:
            kv.book.tables[request.sequence_id].reverse()
        return super().plan(view, budget, kv)


class TakesTablesOver(PlainScheduler):
    """Acquires one step early and goes on from there; a sequence that waits so holds an empty table."""

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        for request in view.waiting:
            if request.sequence_id in kv.book.tables and not request.holds_kv:
                kv.release(request.sequence_id)
        found = super().plan(view, budget, kv)
        planned = {item.sequence_id for item in found.items}
        for request in view.waiting[:1]:
            if request.sequence_id not in planned and not request.holds_kv:
                kv.acquire(request.sequence_id)
        return found


class Dozes(PlainScheduler):
    """Plans nothing in every seventh step."""

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        found = super().plan(view, budget, kv)
        alone = len(view.running) == 1 and not view.waiting
        return StepPlan() if alone and self.num_plans == 7 else found


class StarvesTheLast(PlainScheduler):
    def admit(self, view: StepView, kv: Any, left: int, seats: int, items: dict[int, PlanItem]) -> None:
        if not (len(view.waiting) == 1 and not view.running and view.step > 60):
            super().admit(view, kv, left, seats, items)


class LetsExhaustionEscape(PlainScheduler):
    def extend(self, kv: Any, request: RequestView, num_tokens: int) -> bool:
        if request.num_computed == 0 and request.num_prompt == 30 and num_tokens in (4, 30):
            kv.extend(request.sequence_id, num_tokens)
            return True
        return super().extend(kv, request, num_tokens)


class Alternates(PlainScheduler):
    """Every second object serves a token less once."""

    objects: list[int] = []  # noqa: RUF012 - the shared state is what is wrong with it

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.objects.append(1)
        self.late = len(self.objects) % 2 == 0

    def plan(self, view: StepView, budget: Budget, kv: Any) -> StepPlan:
        found = super().plan(view, budget, kv)
        if self.late and found.items and found.items[0].num_tokens > 1:
            self.late = False
            return first_item(found, num_tokens=found.items[0].num_tokens - 1)
        return found


class TakesTablesAgain(PlainScheduler):
    """Acquires for everyone who waits, as if nobody waited with KV."""

    def acquire(self, kv: Any, request: RequestView) -> int:
        kv.acquire(request.sequence_id)
        return 0


class IgnoresTheCache(PlainScheduler):
    """Adopts and then computes everything all the same."""

    def acquire(self, kv: Any, request: RequestView) -> int:
        super().acquire(kv, request)
        return 0


BROKEN: dict[str, type[PlainScheduler]] = {
    "nothing_to_do_gives_an_empty_plan": replans(invents_work),
    "token_budget_is_kept": SpendsTwice,
    "seats_are_kept": OneSeatMore,
    "items_are_pending_work": replans(asks_for_too_much),
    "items_have_kv": ForgetsToExtend,
    "preempted_are_running_and_get_nothing": replans(names_waiting_victims),
    "preempted_are_released": KeepsVictimsBlocks,
    "running_sequences_keep_their_kv": SwapsBlocks,
    "only_planned_sequences_take_kv": TakesTablesOver,
    "work_is_found_when_there_is_room": Dozes,
    "adopted_tokens_count_as_computed": IgnoresTheCache,
    "every_request_finishes": StarvesTheLast,
    "every_lane_finishes": TakesTablesAgain,
    "a_full_pool_is_no_error": LetsExhaustionEscape,
    "same_state_same_plan": Alternates,
}


def test_a_plain_scheduler_passes() -> None:
    report = run_checks(scheduler_checks(PlainScheduler))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in scheduler_checks(PlainScheduler)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_scheduler_fails_exactly_its_check(name: str) -> None:
    report = run_checks(scheduler_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
