"""Closed examples of first come, first served, worked out in each test, and its bounds on whole runs of a world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Skip, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.simulation import Job, Turn, World, busy_world, play, world
from pluglm_schedulers.fcfs import FcfsConfig, FcfsPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(sequence_id: int, arrival_s: float, priority: int = 0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=priority, arrival_s=arrival_s,
        num_prompt=4, num_known=4, num_computed=0, num_drafts=0, num_output=0, max_new_tokens=8, num_preemptions=0,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView], number: int = 1) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=number, now_s=100.0, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(**config: Any) -> FcfsPolicy:
    return FcfsPolicy(FcfsConfig(**config), CONTEXT)


def test_order_is_arrival_then_sequence_id_and_ignores_priority() -> None:
    shuffled = [request(3, 2.0, priority=-9), request(7, 1.0), request(1, 2.0), request(9, 0.5)]
    assert list(policy().order_running(step(shuffled, []))) == [9, 7, 1, 3]
    assert list(policy().order_waiting(step([], shuffled))) == [9, 7, 1, 3]


def test_everyone_may_queue_and_take_all_that_is_left() -> None:
    one = request(1, 0.0)
    assert policy().admit(one, 10_000) == Accept()
    assert policy().share(step([one], []), one, 37) == 37


def test_running_request_takes_kv_from_later_arrivals_latest_first() -> None:
    a, b, c, d = request(1, 0.0), request(2, 1.0), request(3, 2.0), request(4, 2.0)
    assert policy().on_blocked(step([b, d, a, c], []), b, "kv") == Victims((4, 3))


def test_last_running_request_has_no_victims() -> None:
    a, b = request(1, 0.0), request(2, 1.0)
    assert policy().on_blocked(step([a, b], []), b, "kv") == Stop()


def test_waiting_request_never_preempts_even_a_later_arrival() -> None:
    early, late = request(1, 0.0), request(2, 1.0)
    for need in ("kv", "seat"):
        assert policy().on_blocked(step([late], [early]), early, need) == Stop()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=8))
def test_the_oldest_running_request_is_never_a_victim(arrivals: list[float]) -> None:
    running = [request(index, arrival) for index, arrival in enumerate(arrivals)]
    oldest = min(running, key=lambda one: (one.arrival_s, one.sequence_id)).sequence_id
    for one in running:
        answer = policy().on_blocked(step(running, []), one, "kv")
        victims = answer.sequence_ids if isinstance(answer, Victims) else ()
        assert oldest not in victims
        assert one.sequence_id not in victims


def turns_of(place: World, **config: Any) -> list[Turn]:
    turns: list[Turn] = []
    play(place, PolicyScheduler(policy(**config)), turns.append)
    assert not place.unfinished
    return turns


def tokens_by_step(turns: list[Turn]) -> list[dict[int, int]]:
    return [{item.sequence_id: item.num_tokens for item in turn.plan.items} for turn in turns]


def first_step(turns: list[Turn], sequence_id: int) -> int:
    return next(turn.view.step for turn in turns if sequence_id in {item.sequence_id for item in turn.plan.items})


def test_long_prompt_starves_nobody_and_wastes_nothing() -> None:
    """24 tokens a step: short ones start in the step they arrive in, and the long one has all tokens but theirs."""
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=100, max_new=1),
        Job(sequence_id=2, arrival=1, num_prompt=5, max_new=1),
        Job(sequence_id=3, arrival=2, num_prompt=30, max_new=1),
    ]
    expected = [{1: 24}, {1: 19, 2: 5}, {1: 12, 3: 12}, {1: 12, 3: 12}, {1: 18, 3: 6}, {1: 15}]
    assert tokens_by_step(turns_of(world(jobs))) == expected


def test_without_a_share_later_prompts_wait_until_the_long_one_is_computed() -> None:
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=100, max_new=1),
        Job(sequence_id=2, arrival=1, num_prompt=5, max_new=1),
    ]
    expected = [{1: 24}, {1: 24}, {1: 24}, {1: 24}, {1: 4, 2: 5}]
    assert tokens_by_step(turns_of(world(jobs), long_prefill_share=1)) == expected


def crowd() -> World:
    """1 runs long in most of the pool; 2 finds no room beside it; later ones each find some for a step."""
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=20, max_new=40),
        Job(sequence_id=2, arrival=1, num_prompt=50, max_new=1),
        *(Job(sequence_id=number, arrival=number, num_prompt=3, max_new=1) for number in range(3, 20)),
    ]
    return world(jobs, num_blocks=16)


def test_request_without_room_holds_back_all_behind_it() -> None:
    turns = turns_of(crowd())
    assert first_step(turns, 3) >= first_step(turns, 2)


@pytest.mark.parametrize("max_skips", [1, 4, 7])
def test_request_without_room_is_passed_in_at_most_max_skips_steps(max_skips: int) -> None:
    """Those that arrive one a step from step 3 on start at once, until the limit; the rest come after it."""
    turns = turns_of(crowd(), skip_blocked=1, max_skips=max_skips)
    start = first_step(turns, 2)
    passed = [number for number in range(3, 20) if first_step(turns, number) < start]
    steps = {first_step(turns, number) for number in passed}
    assert steps == set(range(3, 3 + max_skips))
    assert passed == list(range(3, 3 + max_skips))


def test_at_most_skip_blocked_are_passed_in_one_step_and_the_answer_stays() -> None:
    """In the second step nobody had left the queue; before the third, 4 had, and 1 and 2 were passed."""
    chosen, waiting = policy(skip_blocked=2, max_skips=1), [request(number, 0.0) for number in (1, 2, 3)]
    once, then = [Skip(), Skip(), Stop()], [Stop(), Stop(), Skip()]
    for number, behind, answers in ((1, [request(4, 0.0)], once), (2, [request(4, 0.0)], once), (3, [], then)):
        view = step([request(9, 5.0)], [*waiting, *behind], number)
        for _ in range(2):
            list(chosen.order_running(view))
            assert [chosen.on_blocked(view, one, "kv") for one in waiting] == answers
    assert chosen.on_blocked(view, waiting[2], "seat") == Stop()  # who has no seat lets nobody pass


def overtaken_steps(turns: list[Turn]) -> Iterator[int]:
    """For each wait: the steps in which a later arrival started ahead of it."""
    counts: dict[int, int] = {}
    for turn in turns:
        planned = {item.sequence_id for item in turn.plan.items}
        started = [one for one in turn.view.waiting if one.sequence_id in planned]
        for one in turn.view.waiting:
            mine = (one.arrival_s, one.sequence_id)
            if one.sequence_id in planned:
                yield counts.pop(one.sequence_id, 0)
            elif any((other.arrival_s, other.sequence_id) > mine for other in started):
                counts[one.sequence_id] = counts.get(one.sequence_id, 0) + 1


@pytest.mark.parametrize("seed", range(8))
def test_overtaking_in_random_worlds_is_within_the_bound(seed: int) -> None:
    assert max(overtaken_steps(turns_of(busy_world(seed)))) == 0
    for max_skips in (1, 3):
        turns = turns_of(busy_world(seed), skip_blocked=2, max_skips=max_skips)
        assert max(overtaken_steps(turns)) <= max_skips


@pytest.mark.parametrize(
    "wrong", [{"long_prefill_share": 0}, {"long_prefill_share": 1.5}, {"skip_blocked": -1}, {"max_skips": 0}]
)
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        FcfsConfig.model_validate(wrong)
