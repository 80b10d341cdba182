"""The contract kit of whole schedulers: budgets, seats, KV and progress, in a simulated world without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pluglm.ahead.choice import promises
from pluglm.kernel.core import StepPlan
from pluglm.kernel.interfaces.scheduler import Scheduler
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context
from pluglm.testing.plans_ahead import plans_ahead_checks
from pluglm.testing.simulation import BLOCK_SIZE, Job, Turn, World, busy_world, play, world

Make = Callable[[], Scheduler]


def scheduler_checks(cls: type[Any], config: Any = None, **context: Any) -> Iterator[Check]:
    """Every check of a scheduler class."""
    config = cls.Config() if config is None else config

    def make() -> Scheduler:
        scheduler: Scheduler = cls(config, make_context(**context))
        return scheduler

    yield from common_checks("scheduler", cls, config, make)
    for function in ALWAYS:
        yield make_check(function, make)
    if promises(cls):
        yield from plans_ahead_checks(make, lambda scheduler: scheduler, is_policy=False)


def _play_busy_worlds(make: Make, judge: Callable[[Turn], None]) -> None:
    for seed in range(4):
        play(busy_world(seed), make(), judge, max_steps=150)


def nothing_to_do_gives_an_empty_plan(make: Make) -> None:
    found = world([]).step(make()).plan
    expect(found == StepPlan(), "an empty plan for an empty view", found)


def token_budget_is_kept(make: Make) -> None:
    def judge(turn: Turn) -> None:
        total = sum(item.num_tokens for item in turn.plan.items)
        expect(total <= turn.view.budget.num_tokens, f"at most {turn.view.budget.num_tokens} tokens", total)

    _play_busy_worlds(make, judge)


def seats_are_kept(make: Make) -> None:
    def judge(turn: Turn) -> None:
        running = {one.sequence_id for one in turn.view.running} - _leaving(turn.plan)
        seated = running | {item.sequence_id for item in turn.plan.items}
        expect(len(seated) <= turn.view.budget.num_seats, f"at most {turn.view.budget.num_seats} seats", seated)

    _play_busy_worlds(make, judge)


def items_are_pending_work(make: Make) -> None:
    def judge(turn: Turn) -> None:
        ids = [item.sequence_id for item in turn.plan.items]
        expect(len(ids) == len(set(ids)), "each sequence once", ids)
        expect(set(ids) <= set(turn.views), f"sequences of the view, {sorted(turn.views)}", ids)
        for item in turn.plan.items:
            pending = turn.views[item.sequence_id].num_pending - turn.adopted.get(item.sequence_id, 0)
            expect(1 <= item.num_tokens <= pending, f"1 to {pending} pending tokens", item)

    _play_busy_worlds(make, judge)


def items_have_kv(make: Make) -> None:
    """Extended to computed + num_tokens, in the transaction that came with the view."""

    def judge(turn: Turn) -> None:
        for item in turn.plan.items:
            computed = turn.views[item.sequence_id].num_computed + turn.adopted.get(item.sequence_id, 0)
            needed = computed + item.num_tokens
            room = BLOCK_SIZE * len(turn.after.get(item.sequence_id, ()))
            expect(room >= needed, f"blocks for {needed} tokens of sequence {item.sequence_id}", f"room for {room}")

    _play_busy_worlds(make, judge)


def _leaving(plan: StepPlan) -> set[int]:
    """Those that lose their seat."""
    return {*plan.preempted, *plan.offloaded, *plan.paused, *(one for one, _ in plan.refused)}


def preempted_are_running_and_get_nothing(make: Make) -> None:
    """Whoever waits has no seat to lose, but may hold KV: of those, preempted may name any."""

    def judge(turn: Turn) -> None:
        plan, running = turn.plan, {one.sequence_id for one in turn.view.running}
        named = [*plan.preempted, *plan.offloaded, *plan.paused, *(one for one, _ in plan.refused)]
        expect(len(set(named)) == len(named), "each victim once", named)
        holding = {one.sequence_id for one in turn.view.waiting if one.holds_kv}
        expect(set(plan.preempted) <= running | holding, f"victims among {sorted(running | holding)}", plan.preempted)
        moved = {*plan.offloaded, *plan.paused}
        expect(moved <= running, f"those offloaded or paused among the running {sorted(running)}", sorted(moved))
        both = set(named) & {item.sequence_id for item in plan.items}
        expect(not both, "no item of a preempted sequence", both)

    _play_busy_worlds(make, judge)


def preempted_are_released(make: Make) -> None:
    def judge(turn: Turn) -> None:
        holding = [one for one in _leaving(turn.plan) - {*turn.plan.paused} if one in turn.after]
        expect(not holding, "no table of a preempted sequence", holding)

    _play_busy_worlds(make, judge)


def running_sequences_keep_their_kv(make: Make) -> None:
    """So do those that wait with KV, unless the plan says that they lose it."""

    def judge(turn: Turn) -> None:
        losing = _leaving(turn.plan) - {*turn.plan.paused}
        for one in turn.views.values():
            if one.sequence_id in losing or not one.holds_kv:
                continue
            kept, before = turn.after.get(one.sequence_id, ()), turn.before.get(one.sequence_id, ())
            needed = before[: one.num_computed // BLOCK_SIZE]  # a block that is shared and half full may be copied
            expect(kept[: len(needed)] == needed, f"sequence {one.sequence_id} to keep {needed}", kept)

    _play_busy_worlds(make, judge)


def only_planned_sequences_take_kv(make: Make) -> None:
    """A waiting sequence without an item holds no more than it came with, or its blocks leak."""

    def judge(turn: Turn) -> None:
        planned = {item.sequence_id for item in turn.plan.items}
        idle = [one.sequence_id for one in turn.view.waiting if one.sequence_id not in planned]
        more = [one for one in idle if len(turn.after.get(one, ())) > len(turn.before.get(one, ()))]
        expect(not more, "no further blocks of waiting sequences without an item", more)
        empty = [one for one in idle if one in turn.after and one not in turn.before]
        expect(not empty, "no table of waiting sequences without an item", empty)

    _play_busy_worlds(make, judge)


def adopted_tokens_count_as_computed(make: Make) -> None:
    """What `acquire` gives back of a cached prefix is not planned again: the rest of the prompt is."""
    jobs = [Job(sequence_id=one, arrival=one, num_prompt=9 + one, max_new=3, num_cached=7) for one in range(6)]
    place = world(jobs)

    def judge(turn: Turn) -> None:
        for item in turn.plan.items:
            if num_adopted := turn.adopted.get(item.sequence_id):
                pending = turn.views[item.sequence_id].num_pending - num_adopted
                expect(1 <= item.num_tokens <= pending, f"1 to {pending} tokens that were not adopted", item)

    play(place, make(), judge)
    expect(not place.unfinished, "all requests with cached prefixes done in 400 steps", f"{place.unfinished} left")


def work_is_found_when_there_is_room(make: Make) -> None:
    """One sequence alone with the whole pool, waiting or running, gets at least a token in every step."""
    place = world([Job(sequence_id=3, arrival=0, num_prompt=60, max_new=8)])

    def judge(turn: Turn) -> None:
        expect(len(turn.plan.items) == 1, "an item for the only sequence", turn.plan)

    play(place, make(), judge, max_steps=60)


def every_request_finishes(make: Make) -> None:
    for seed in range(4):
        place = busy_world(seed)
        play(place, make(), lambda turn: None)
        expect(not place.unfinished, f"all requests of world {seed} done in 400 steps", f"{place.unfinished} left")


def every_lane_finishes(make: Make) -> None:
    """Requests of several outputs: the others wait with the KV that they were forked with, which nobody takes again.

    In the last world the pool holds one output alone, so those that wait must let go of theirs.
    """
    worlds = [busy_world(seed) for seed in range(4)]
    for place in worlds:
        for job in place.jobs[::3]:
            job.num_lanes = 3
    worlds.append(world([Job(sequence_id=1, arrival=0, num_prompt=8, max_new=8, num_lanes=3)], num_blocks=4))
    for number, place in enumerate(worlds):
        play(place, make(), lambda turn: None, max_steps=800)
        expect(not place.unfinished, f"all lanes of world {number} done in 800 steps", f"{place.unfinished} left")


def a_full_pool_is_no_error(make: Make) -> None:
    """Prompts that cannot all fit, over a pool that one of them nearly fills."""
    jobs = [Job(sequence_id=number, arrival=0, num_prompt=30, max_new=2) for number in range(3)]
    place = world(jobs, num_blocks=9, num_tokens=64)
    place.step(make())
    place.step(make())


def same_state_same_plan(make: Make) -> None:
    first, second = _plans(make, busy_world(7)), _plans(make, busy_world(7))
    expect(first == second, f"the same plans for the same states, {first}", second)


def _plans(make: Make, place: World) -> list[StepPlan]:
    plans: list[StepPlan] = []
    play(place, make(), lambda turn: plans.append(turn.plan), max_steps=60)
    return plans


ALWAYS = (
    nothing_to_do_gives_an_empty_plan,
    token_budget_is_kept,
    seats_are_kept,
    items_are_pending_work,
    items_have_kv,
    preempted_are_running_and_get_nothing,
    preempted_are_released,
    running_sequences_keep_their_kv,
    only_planned_sequences_take_kv,
    work_is_found_when_there_is_room,
    adopted_tokens_count_as_computed,
    every_request_finishes,
    every_lane_finishes,
    a_full_pool_is_no_error,
    same_state_same_plan,
)
