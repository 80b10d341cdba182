"""The contract kit of scheduling policies: answers are of the right kind and about the right sequences."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from pluglm.ahead.choice import promises
from pluglm.kernel.core import Budget, Event, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Need, Preemption, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context
from pluglm.testing.plans_ahead import plans_ahead_checks
from pluglm.testing.simulation import Job, World, busy_world, world

Make = Callable[[], SchedulingPolicy]
NEEDS: tuple[Need, ...] = ("kv", "seat")
MODES: tuple[Preemption, ...] = get_args(Preemption)


def scheduling_policy_checks(cls: type[Any], config: Any = None, **context: Any) -> Iterator[Check]:
    """Every check of a policy class, alone and behind the kernel's planner."""
    config = cls.Config() if config is None else config

    def make() -> SchedulingPolicy:
        policy: SchedulingPolicy = cls(config, make_context(**context))
        return policy

    yield from common_checks("scheduling_policy", cls, config, make)
    for function in ALWAYS:
        yield make_check(function, make)
    if promises(cls):
        yield from plans_ahead_checks(make, PolicyScheduler, is_policy=True)


def _views(count: int = 12) -> list[StepView]:
    """Random running and waiting sequences, each in one view; the first view has none."""
    return [_view(random.Random(number), min(number, 4), number % 6, number) for number in range(count)]


def _view(generator: random.Random, num_running: int, num_waiting: int, number: int = 0) -> StepView:
    ids = [100 * number + one for one in generator.sample(range(1, 60), num_running + num_waiting)]
    views = [_request(generator, one, index < num_running) for index, one in enumerate(ids)]
    waiting = sorted(views[num_running:], key=lambda one: (one.arrival_s, one.sequence_id))
    budget = Budget(num_tokens=32, num_seats=5)
    return StepView(
        step=1000 + number, now_s=2.0, budget=budget, running=tuple(views[:num_running]), waiting=tuple(waiting)
    )


def _request(generator: random.Random, sequence_id: int, running: bool, num_left: int | None = None) -> RequestView:
    """num_left: tokens of the prompt to compute. One in four that wait is paused: it holds KV of what it computed."""
    prompt = generator.randint(4, 30)
    paused = not running and generator.randrange(4) == 0
    num_left = generator.randint(1, prompt - 1) if num_left is None else num_left
    return Job(
        sequence_id=sequence_id,
        arrival=generator.randint(0, 150),
        num_prompt=prompt,
        max_new=8,
        priority=generator.randint(-1, 3),
        deadline=generator.choice([None, generator.randint(150, 400)]),
        num_cached=generator.randint(0, 20),
        num_computed=prompt - num_left if running or paused else 0,
        running=running,
        holds_kv=paused,
    ).view()


def admission_is_answered(make: Make) -> None:
    policy = make()
    for view in _views():
        for request in view.waiting:
            answer = policy.admit(request, len(view.waiting))
            expect(isinstance(answer, Accept | Reject), "Accept or Reject", answer)
            if isinstance(answer, Reject):
                one_line = bool(answer.reason.strip()) and "\n" not in answer.reason
                expect(one_line, "a reason of one line", repr(answer.reason))


def running_order_names_running_sequences(make: Make) -> None:
    for view in _views():
        _expect_choice(list(make().order_running(view)), [one.sequence_id for one in view.running])


def waiting_order_names_waiting_sequences(make: Make) -> None:
    for view in _views():
        _expect_choice(list(make().order_waiting(view)), [one.sequence_id for one in view.waiting])


def _expect_choice(found: list[int], known: list[int]) -> None:
    expect(set(found) <= set(known), f"ids among {sorted(known)}", found)
    expect(len(found) == len(set(found)), "each id once", found)


def share_is_a_count(make: Make) -> None:
    policy = make()
    for view in _views():
        for request in (*view.running, *view.waiting):
            for left in (1, 7, 32):
                found = policy.share(view, request, left)
                fine = isinstance(found, int) and not isinstance(found, bool) and found >= 0
                expect(fine, "a number of tokens, 0 or more", repr(found))


def an_idle_engine_gets_work(make: Make) -> None:
    """With sequences in view and everything free, at least one of them is named and gets a token."""
    policy = make()
    for seed in range(20):
        for num_running, num_waiting in ((1, 0), (0, 1), (3, 0), (0, 3)):
            view = _view(random.Random(seed), num_running, num_waiting, seed)
            requests = {one.sequence_id: one for one in (*view.running, *view.waiting)}
            named = [*policy.order_running(view), *policy.order_waiting(view)]
            served = [one for one in named if one in requests and policy.share(view, requests[one], 32) > 0]
            expect(bool(served), f"a token for one of {sorted(requests)}", f"order {named} and no share")


def blocked_requests_get_an_answer(make: Make) -> None:
    policy = make()
    for view in _views():
        for request in (*view.running, *view.waiting):
            for need in NEEDS:
                answer = policy.on_blocked(view, request, need)
                expect(isinstance(answer, Stop | Skip | Victims), "Stop, Skip or Victims", answer)


def victims_are_other_running_sequences(make: Make) -> None:
    policy = make()
    for view in _views():
        running = {one.sequence_id for one in view.running}
        for request in (*view.running, *view.waiting):
            for need in NEEDS:
                answer = policy.on_blocked(view, request, need)
                victims = answer.sequence_ids if isinstance(answer, Victims) else ()
                others = running - {request.sequence_id}
                expect(set(victims) <= others, f"victims among {sorted(others)}", victims)
                expect(len(victims) == len(set(victims)), "each victim once", victims)


def victims_have_a_known_mode(make: Make) -> None:
    policy = make()
    for view in _views():
        for request in (*view.running, *view.waiting):
            for need in NEEDS:
                answer = policy.on_blocked(view, request, need)
                if isinstance(answer, Victims):
                    expect(answer.mode in MODES, f"one of {', '.join(MODES)} as the mode of Victims", repr(answer.mode))


def equal_views_equal_answers(make: Make) -> None:
    """Asked again, asked about a copy, or asked as the first thing ever."""
    used = make()
    for view in _views():
        first, second, copied, fresh = (
            _answers(policy, seen)
            for policy, seen in ((used, view), (used, view), (used, replace(view)), (make(), view))
        )
        same = first == second == copied == fresh
        expect(same, f"the same answers to the same questions, {first}", f"{second}, {copied} and {fresh}")


def _answers(policy: SchedulingPolicy, view: StepView) -> tuple[object, ...]:
    requests = (*view.running, *view.waiting)
    return (
        tuple(policy.order_running(view)),
        tuple(policy.order_waiting(view)),
        tuple(policy.share(view, one, 16) for one in requests),
        tuple(policy.on_blocked(view, one, need) for one in requests for need in NEEDS),
    )


def events_are_taken(make: Make) -> None:
    policy = make()
    for event in (
        Event(request_id="r1", token_ids=(5,), text="a"),
        Event(request_id="r1", finish_reason="stop", stop=7),
        Event(request_id="never seen", finish_reason="cancelled"),
        Event(request_id="r2", finish_reason="error", error="a plugin failed"),
    ):
        policy.on_event(event)


def every_request_finishes(make: Make) -> None:
    """Behind the kernel's planner, over few seats and blocks, with preemptions."""
    for seed in range(4):
        place = busy_world(seed)
        _serve(make(), place)
        expect(not place.unfinished, f"all requests of world {seed} done in 400 steps", f"{place.unfinished} left")


def every_lane_finishes(make: Make) -> None:
    """The same for one tenant's requests of several outputs, which wait with the KV that they were forked with."""
    for seed in range(4):
        place = busy_world(seed)
        for index, job in enumerate(place.jobs):
            job.tenant, job.num_lanes = "lanes", 3 if index % 3 == 0 else 1
        _serve(make(), place, max_steps=800)
        expect(not place.unfinished, f"all lanes of world {seed} done in 800 steps", f"{place.unfinished} left")


def _serve(policy: SchedulingPolicy, place: World, max_steps: int = 400) -> None:
    """Steps until every job is finished, with all that an engine tells a policy; whoever is refused is finished."""
    planner, admitted = PolicyScheduler(policy), {job.request_id for job in place.jobs if job.finished}
    while place.unfinished and place.now < max_steps:
        for job in place.jobs:
            if job.arrival <= place.now and job.request_id not in admitted:
                admitted.add(job.request_id)
                job.finished = isinstance(policy.admit(job.view(), len(place.view().waiting)), Reject)
        for event in place.step(planner).events:
            policy.on_event(event)


def memory_does_not_grow_with_requests(make: Make) -> None:
    """Three times as many requests, each of its own tenant, leave no more behind: per request, nothing is kept."""
    policy, place, held = make(), world([]), list[int]()
    for wave in range(3):
        first = 1 + 100 * wave
        for one in range(first, first + 40):
            size = 1 + one % 5
            job = Job(
                sequence_id=one, arrival=place.now + one % 7, num_prompt=size, max_new=size, tenant=f"tenant {one}"
            )
            place.jobs.append(job)
        _serve(policy, place, max_steps=place.now + 400)
        held.append(num_held(policy))
    expect(held[-1] < held[0] + 40, f"about {held[0]} things held after 120 requests, as after 40", held[-1])


def num_held(root: object) -> int:
    """Elements of all containers that can be reached through attributes and elements."""
    stack, seen, count = [root], set[int](), 0
    while stack:
        one = stack.pop()
        if id(one) in seen or callable(one) or isinstance(one, str | bytes | range):
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            count += len(one)
            stack += [*one, *one.values()] if isinstance(one, dict) else one
        else:
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            stack += [getattr(one, name, None) for name in names]
    return count


ALWAYS = (
    admission_is_answered,
    running_order_names_running_sequences,
    waiting_order_names_waiting_sequences,
    share_is_a_count,
    an_idle_engine_gets_work,
    blocked_requests_get_an_answer,
    victims_are_other_running_sequences,
    victims_have_a_known_mode,
    equal_views_equal_answers,
    events_are_taken,
    every_request_finishes,
    every_lane_finishes,
    memory_does_not_grow_with_requests,
)
