"""Longest cached prefix first: closed examples, and the bound on overtaking for any cache and any number of starts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pluglm.kernel.core import Budget, CacheKey, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.simulation import Turn, busy_world, play
from pluglm_schedulers.prefix_first import PrefixFirstConfig, PrefixFirstPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


class Cache:
    """Tokens cached of each sequence, by id; remembers who was asked about."""

    def __init__(self, **cached: int) -> None:
        self.cached, self.asked = cached, list[int]()

    def request(
        self, sequence_id: int, *, arrival_s: float | None = None, tokens: Any = None, computed: int = 0
    ) -> RequestView:
        """Arrives in the order of its id unless told otherwise; tokens of its own unless given."""
        tokens = [1000 * sequence_id + index for index in range(100)] if tokens is None else tokens

        def probe(key: CacheKey) -> int:
            self.asked.append(sequence_id)
            return self.cached.get(f"r{sequence_id}", 0)

        key = None if computed else CacheKey(namespace=b"n", token_ids=tokens, limit=len(tokens) - 1)
        return RequestView(
            sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, num_prompt=len(tokens),
            arrival_s=float(sequence_id) if arrival_s is None else arrival_s, num_known=len(tokens),
            num_computed=computed, num_drafts=0, num_output=0, max_new_tokens=8, num_preemptions=0, cache_key=key,
            probe=probe,
        )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView], seats: int = 4, now_s: float = 10.0) -> StepView:
    budget = Budget(num_tokens=64, num_seats=seats)
    return StepView(step=1, now_s=now_s, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(**config: Any) -> PrefixFirstPolicy:
    return PrefixFirstPolicy(PrefixFirstConfig(**config), CONTEXT)


def order(chosen: PrefixFirstPolicy, view: StepView) -> list[int]:
    list(chosen.order_running(view))
    return list(chosen.order_waiting(view))


def test_longest_cached_prefix_first_then_arrival() -> None:
    cache = Cache(r2=5, r3=70, r5=5)
    assert order(policy(), step([], [cache.request(one) for one in (1, 2, 3, 4, 5)])) == [3, 2, 5, 1, 4]


def test_only_the_window_is_looked_up_and_the_rest_follows_by_arrival() -> None:
    cache = Cache(r2=5, r4=70, r5=80)
    assert order(policy(window=3), step([], [cache.request(one) for one in (1, 2, 3, 4, 5)])) == [2, 1, 3, 4, 5]
    assert cache.asked == [1, 2, 3]


def test_cache_is_not_asked_when_no_seat_is_free_or_nobody_is_pulled() -> None:
    cache = Cache(r2=5)
    view = step([cache.request(9, computed=50)], [cache.request(1), cache.request(2)], seats=1)
    assert order(policy(), view) == [1, 2]
    policy().order_waiting(step([], [cache.request(1), cache.request(2)]))
    assert cache.asked == []


def test_older_than_ageing_goes_first() -> None:
    cache = Cache(r2=5, r3=70)
    waiting = [cache.request(one) for one in (1, 2, 3)]
    for now_s, expected in ((31.0, [3, 2, 1]), (31.1, [1, 3, 2]), (32.1, [1, 2, 3])):
        assert order(policy(ageing="30s"), step([], waiting, now_s=now_s)) == expected


def test_overtaken_often_enough_it_goes_first_and_zero_is_first_come_first_served() -> None:
    cache = Cache(r2=5, r3=70, r4=60)
    waiting = [cache.request(one) for one in (1, 2, 3, 4)]
    for limit, expected in ((0, [1, 2, 3, 4]), (1, [3, 1, 2, 4]), (2, [3, 4, 1, 2]), (3, [3, 4, 2, 1])):
        assert order(policy(max_overtakes=limit), step([], waiting)) == expected


def test_those_that_left_count_as_long_as_a_request_waits() -> None:
    """3 passes 1 and 2; then 4 may not pass 1 any more. Once 1 has started and waits again, it starts at none."""
    cache = Cache(r2=5, r3=70, r4=60)
    chosen, (first, second, third, fourth) = policy(max_overtakes=1), [cache.request(one) for one in (1, 2, 3, 4)]
    assert order(chosen, step([], [first, second, third, fourth])) == [3, 1, 2, 4]
    assert order(chosen, step([], [first, second, fourth])) == [1, 2, 4]
    assert order(chosen, step([], [second, fourth])) == [2, 4]
    assert order(chosen, step([], [first, fourth])) == [4, 1]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_overtaken_more_than_max_overtakes_times(seed: int) -> None:
    """Any cache, any number of starts a step, arrivals for ever, and some that are preempted and wait anew."""
    generator, limit = random.Random(seed), seed % 5
    cache, chosen = Cache(), policy(max_overtakes=limit, window=6)
    waiting, started, ran = list[RequestView](), list[RequestView](), list[RequestView]()
    overtaken, most, next_id = dict[int, int](), 0, 1
    for _ in range(300):
        for _ in range(generator.randint(0, 3)):
            cache.cached[f"r{next_id}"] = generator.choice([0, 0, 16, 48, 64])
            waiting.append(cache.request(next_id))
            next_id += 1
        if ran and generator.random() < 0.5:
            waiting.append(generator.choice(ran))
        waiting.sort(key=lambda one: one.sequence_id)
        ran, queue = started, {one.sequence_id: one for one in waiting}
        names = order(chosen, step([], waiting, now_s=0.0))[: generator.randint(0, 3)]
        for index, name in enumerate(names):
            most = max(most, overtaken.pop(name, 0))
            for other in queue:
                if other < name and other not in names[:index]:
                    overtaken[other] = overtaken.get(other, 0) + 1
        started = [queue[name] for name in names]
        waiting = [one for one in waiting if one.sequence_id not in names]
        assert max(overtaken.values(), default=0) <= limit
    assert most == limit


SHARED = list(range(64))


def test_request_is_held_back_while_another_computes_what_it_begins_with() -> None:
    cache = Cache()
    first, second, other = (
        cache.request(1, tokens=[*SHARED, 7]),
        cache.request(2, tokens=[*SHARED, 8]),
        cache.request(3),
    )
    chosen = policy()
    assert order(chosen, step([], [first, second, other])) == [1, 3]
    runs = cache.request(1, tokens=[*SHARED, 7], computed=40)
    assert order(chosen, step([runs], [second, other])) == [3]
    cache.cached["r2"] = 64
    assert order(chosen, step([cache.request(1, tokens=[*SHARED, 7], computed=64)], [second, other])) == [2, 3]


@pytest.mark.parametrize(
    ("config", "tokens"),
    [({"hold_back": 0}, [*SHARED, 8]), ({"hold_back": 48}, [*SHARED[:47], *SHARED]), ({}, SHARED[:32])],
    ids=["off", "shares too little", "could not adopt that much"],
)
def test_request_is_not_held_back(config: dict[str, int], tokens: list[int]) -> None:
    cache = Cache()
    waiting = [cache.request(1, tokens=[*SHARED, 7]), cache.request(2, tokens=tokens)]
    assert order(policy(**config), step([], waiting)) == [1, 2]


def test_request_is_not_held_back_for_one_that_was_preempted_and_no_longer_than_the_bound() -> None:
    cache = Cache()
    waiting = [cache.request(one, tokens=[*SHARED, one]) for one in (1, 2)]
    chosen = policy(max_overtakes=1)
    assert order(chosen, step([], waiting)) == [1]
    late = [cache.request(3), cache.request(4)]
    runs = cache.request(1, tokens=[*SHARED, 1], computed=40)
    assert order(chosen, step([runs], [waiting[1], *late])) == [3, 2, 4]  # after one of them it must go
    chosen = policy()
    assert order(chosen, step([], waiting)) == [1]
    assert order(chosen, step([cache.request(1, tokens=[*SHARED, 1], computed=40)], waiting[1:])) == []
    assert order(chosen, step([], waiting[1:])) == [2]


def test_preemption_follows_arrival_and_who_waits_never_preempts() -> None:
    cache = Cache(r3=90)
    running = [cache.request(one, computed=50) for one in (4, 1, 2)]
    view = step(running, [cache.request(3)])
    assert policy().on_blocked(view, running[1], "kv") == Victims((4, 2))
    assert policy().on_blocked(view, running[0], "kv") == Stop()
    assert [policy().on_blocked(view, view.waiting[0], need) for need in ("kv", "seat")] == [Stop(), Stop()]
    assert policy().admit(view.waiting[0], 10_000) == Accept()


@pytest.mark.parametrize("seed", range(4))
def test_cached_prefixes_are_adopted_and_all_requests_end(seed: int) -> None:
    place, turns = busy_world(seed), list[Turn]()
    for job in place.jobs:
        job.num_cached = job.sequence_id % 4 * 8
    play(place, PolicyScheduler(policy(window=3, max_overtakes=2)), turns.append)
    assert not place.unfinished
    assert sum(sum(turn.adopted.values()) for turn in turns) > 0
