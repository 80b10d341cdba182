"""Rule 8 for schedulers and policies: one that misbehaves fails only what it touched."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import GREEDY, require_idle
from fault_cases import BAD, NAMED

from pluglm.kernel.errors import ComponentFailure, RequestError

SCHEDULERS = {
    "raises": ("raise ValueError('no idea')", "raised ValueError: no idea"),
    "raises after taking KV": ("kv.extend(bad, 50); raise ValueError('no idea')", "raised ValueError: no idea"),
    "lets KVExhausted out": ("kv.extend(bad, 10**6)", "tokens need"),
    "none": ("return None", "AttributeError"),
    "tuple": ("return [(bad, 1)]", "AttributeError"),
    "items of another kind": ("return StepPlan(((bad, 1),))", "AttributeError"),
    "acquires twice": ("kv.acquire(bad)", "has a table already"),
}


@pytest.mark.parametrize("fault", SCHEDULERS)
def test_a_plan_that_fails_as_a_whole_fails_all_that_are_live(case: Any, fault: str) -> None:
    act, says = SCHEDULERS[fault]
    case("scheduler", f"def spoil(self, view, plan, kv, bad): {act}").check(says, mates_live=False)


REFUSED = {
    "unknown id": "return StepPlan((*plan.items, PlanItem(999, 1)), plan.preempted)",
    "listed twice": "return StepPlan((*plan.items, *plan.items), plan.preempted)",
    "too many": "return StepPlan((*plan.items, PlanItem(999, 10**6)), plan.preempted)",
    "preempts the unknown": "return StepPlan(plan.items, (*plan.preempted, 999))",
    "preempts the waiting": "return StepPlan(plan.items, tuple(one.sequence_id for one in view.waiting))",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_items_cost_the_others_nothing(case: Any, fault: str) -> None:
    made = case("scheduler", f"def spoil(self, view, plan, kv, bad): {REFUSED[fault]}")
    both = made.run(("good", [1, 2], GREEDY), ("bad", [BAD], GREEDY))
    made.require_good(both["good"], [1, 2])
    made.require_good(both["bad"], [BAD])
    require_idle(made.engine)


SPOILT_ITEM = {
    "too many tokens": "PlanItem(i.sequence_id, i.num_tokens + 1)",
    "no tokens": "PlanItem(i.sequence_id, 0)",
    "half a token": "PlanItem(i.sequence_id, i.num_tokens - 0.5)",
    "tokens in words": "PlanItem(i.sequence_id, 'one')",
}


@pytest.mark.parametrize("fault", SPOILT_ITEM)
def test_an_item_that_is_always_refused_never_runs_and_the_others_do(case: Any, fault: str) -> None:
    """Its request waits until nothing else is planned, and then the scheduler is called stuck, by name."""
    spoilt = f"{SPOILT_ITEM[fault]} if i.sequence_id == bad else i for i in plan.items"
    made = case("scheduler", f"def spoil(self, view, plan, kv, bad): return StepPlan(tuple({spoilt}), plan.preempted)")
    made.check(f"scheduler {NAMED}", "planned nothing in 100 steps")


UNHELD = {
    "waiting, never acquired": "kv.release(bad)",
    "running, released": "kv.release(bad)",
    "acquired and not extended": "kv.trim(bad, 0)",
}


@pytest.mark.parametrize("fault", UNHELD)
def test_an_item_without_its_kv_fails_by_the_schedulers_name(case: Any, fault: str) -> None:
    when = "view.running and" if "running" in fault else ""
    body = f"""
    def spoil(self, view, plan, kv, bad):
        if {when} any(i.sequence_id == bad for i in plan.items): {UNHELD[fault]}
        return plan
    """
    case("scheduler", body).check(f"scheduler {NAMED}", "extended its KV to 0")


def test_a_preempted_sequence_whose_kv_was_not_released_gives_it_back_all_the_same(case: Any) -> None:
    body = """
    done = 0
    def spoil(self, view, plan, kv, bad):
        if self.done < 3 and any(one.sequence_id == bad for one in view.running):
            self.done += 1
            return StepPlan(plan.items, (bad,))
        return plan
    """
    made = case("scheduler", body)
    both = made.run(("good", [1, 2], GREEDY), ("bad", [BAD], GREEDY))
    made.require_good(both["good"], [1, 2])
    made.require_good(both["bad"], [BAD])
    assert both["bad"][1].metrics.num_preemptions == 3
    require_idle(made.engine)


def test_kv_that_was_acquired_for_nothing_is_given_back_in_the_same_step(case: Any) -> None:
    body = """
    def spoil(self, view, plan, kv, bad):
        return StepPlan(tuple(i for i in plan.items if i.sequence_id != bad), plan.preempted)
    """
    made = case("scheduler", body)
    made.core.add("bad", [BAD], GREEDY)
    made.core.step()
    assert made.core.kv.capacity().held_blocks == 0
    made.core.cancel("bad")
    made.core.step()
    require_idle(made.engine)


def test_a_scheduler_that_plans_nothing_for_ever_is_stopped_and_the_next_request_starts_afresh(case: Any) -> None:
    body = """
    patience = 100
    def plan(self, view, budget, kv):
        bad = any(one.request_id == "bad" for one in (*view.running, *view.waiting))
        idle = bad or self.patience > 0
        self.patience = self.patience - 1 if not bad and view.waiting else self.patience
        return StepPlan() if idle else self.inner.plan(view, budget, kv)
    """
    made = case("scheduler", body)
    for _ in range(2):
        made.core.parts.scheduler.patience = 0
        made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"scheduler {NAMED} planned nothing in 100 steps")
        made.core.parts.scheduler.patience = 50  # idle for half the limit: must not be added to what was before
        made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


POLICIES = {
    "order_running": ("def order_running(self, view): raise ValueError('no order')", "no order"),
    "order_waiting": ("def order_waiting(self, view): return None", "TypeError"),
    "share in halves": ("def share(self, view, request, tokens_left): return 0.5", "TypeError"),
    "share raises": ("def share(self, view, request, tokens_left): raise ValueError('no share')", "no share"),
}


@pytest.mark.parametrize("fault", POLICIES)
def test_policy_in_planning(case: Any, fault: str) -> None:
    body, says = POLICIES[fault]
    made = case("policy", body)
    results = made.run(("a", [1, 2], GREEDY), ("b", [3], GREEDY))
    for result in results.values():
        made.require_bad(result, f"scheduler {NAMED}", says)
    require_idle(made.engine)


def test_policy_order_with_doubles_and_strangers_is_harmless(case: Any) -> None:
    body = """
    def order_running(self, view): return [777, *super().order_running(view), *super().order_running(view)]
    def order_waiting(self, view): return [777, *super().order_waiting(view), *super().order_waiting(view)]
    """
    made = case("policy", body, engine={"max_step_tokens": 3})
    results = made.run(("good", [1, 2], GREEDY), ("more", [3, 4, 5, 6], GREEDY))
    made.require_good(results["good"], [1, 2])
    made.require_good(results["more"], [3, 4, 5, 6])
    require_idle(made.engine)


def test_policy_admit(case: Any) -> None:
    body = """
    def admit(self, request, num_waiting):
        if request.request_id == "odd": raise ValueError("who is that")
        return Reject("too busy") if request.request_id == "bad" else super().admit(request, num_waiting)
    """
    made = case("policy", body)
    with pytest.raises(RequestError, match=r"request 'bad': scheduler 'plugin:Faulty' refuses it: too busy"):
        made.core.add("bad", [1], GREEDY)
    with pytest.raises(ComponentFailure, match=r"scheduler 'plugin:Faulty' raised ValueError: who is that"):
        made.core.add("odd", [1], GREEDY)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


def test_policy_on_event_that_raises_costs_nobody_anything(case: Any) -> None:
    made = case("policy", "def on_event(self, event): raise ValueError('lost count')")
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)
