"""The contract kit of being asked about steps that do not come: part of those of schedulers and of policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pluglm.kernel.core import CacheKey, StepPlan, StepView
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.simulation import Planner, Turn, World, busy_world, play

Make = Callable[[], Any]  # a fresh scheduler or policy
PlannerOf = Callable[[Any], Planner]
SEEDS, MAX_STEPS = range(4), 150


def plans_ahead_checks(make: Make, planner_of: PlannerOf, *, is_policy: bool) -> Iterator[Check]:
    """Of a class with the ability PlansAhead. planner_of: what plans with it, itself or the kernel's planner.

    is_policy: it is told of events and arrivals, as a SchedulingPolicy is and a Scheduler is not.
    """
    for function in (*ALWAYS, events_and_arrivals_change_no_plan) if is_policy else ALWAYS:
        yield make_check(function, make, planner_of)


def a_step_that_does_not_come_leaves_no_trace(make: Make, planner_of: PlannerOf) -> None:
    """Asked before every step about another one, with a checkpoint, it plans as if it had not been."""
    for seed in SEEDS:
        _expect_same(_plans(make, planner_of, seed), _plans(make, planner_of, seed, before=_ask_in_vain), seed)


def the_clock_is_not_read(make: Make, planner_of: PlannerOf) -> None:
    for seed in SEEDS:
        _expect_same(_plans(make, planner_of, seed), _plans(make, planner_of, seed, change=_later), seed)


def cached_prefixes_are_not_asked_for(make: Make, planner_of: PlannerOf) -> None:
    for seed in SEEDS:
        _plans(make, planner_of, seed, change=_without_probe)


def events_and_arrivals_change_no_plan(make: Make, planner_of: PlannerOf) -> None:
    """A policy is told of them between the plan that is made ahead and the step."""
    for seed in SEEDS:
        _expect_same(_plans(make, planner_of, seed), _plans(make, planner_of, seed, after=_tell), seed)


def _expect_same(first: list[StepPlan], second: list[StepPlan], seed: int) -> None:
    differing = [index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    step = differing[0] if differing else min(len(first), len(second))
    same = first == second
    expect(same, f"the same plans in world {seed}", "" if same else f"others from step {step} on")


def _plans(
    make: Make,
    planner_of: PlannerOf,
    seed: int,
    *,
    before: Callable[[World, Any, Planner], None] = lambda place, subject, planner: None,
    change: Callable[[StepView], StepView] = lambda view: view,
    after: Callable[[World, Any, Turn], None] = lambda place, subject, turn: None,
) -> list[StepPlan]:
    """One for each step of a busy world. change: of the views that are shown."""
    place, subject, plans = _cached_world(seed), make(), list[StepPlan]()
    planner = planner_of(subject)

    class Shown:
        def plan(self, view: StepView, budget: Any, kv: Any) -> StepPlan:
            return planner.plan(change(view), budget, kv)

    def judge(turn: Turn) -> None:
        plans.append(turn.plan)
        after(place, subject, turn)
        before(place, subject, planner)

    before(place, subject, planner)
    play(place, Shown(), judge, MAX_STEPS)
    return plans


def _cached_world(seed: int) -> World:
    place = busy_world(seed)
    for job in place.jobs[::2]:
        job.num_cached = job.num_prompt // 2
    return place


def _ask_in_vain(place: World, subject: Any, planner: Planner) -> None:
    """About the step with some of the sequences gone, in a transaction that is rolled back."""
    view, dice = place.view(), random.Random(place.now)
    running, waiting = (tuple(one for one in many if dice.random() < 0.7) for many in (view.running, view.waiting))
    restore, transaction = subject.checkpoint(), place.transaction()
    planner.plan(replace(view, running=running, waiting=waiting), view.budget, transaction)
    transaction.rollback()
    restore()


def _later(view: StepView) -> StepView:
    return replace(view, now_s=10.0 + 3.0 * view.now_s)


def _without_probe(view: StepView) -> StepView:
    def refuse(key: CacheKey) -> int:
        raise ValueError("a plan that may be made ahead asks for a cached prefix, which may change before its step")

    return replace(view, waiting=tuple(replace(one, probe=refuse) for one in view.waiting))


def _tell(place: World, subject: Any, turn: Turn) -> None:
    for event in turn.events:
        subject.on_event(event)
    for job in place.jobs:
        if job.arrival == place.now:
            subject.admit(job.view(), len(turn.view.waiting))


ALWAYS = (a_step_that_does_not_come_leaves_no_trace, the_clock_is_not_read, cached_prefixes_are_not_asked_for)
