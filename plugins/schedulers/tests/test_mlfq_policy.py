"""Multi-level feedback queue: levels worked out by hand from the quanta, and who waits how long on whole runs."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.simulation import Job, Turn, World, busy_world, play, world
from pluglm_schedulers.mlfq import MlfqConfig, MlfqPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(sequence_id: int, computed: int = 0, output: int = 0, arrival_s: float = 0.0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, arrival_s=arrival_s,
        num_prompt=1000, num_known=1000 + output, num_computed=computed, num_drafts=0, num_output=output,
        max_new_tokens=80, num_preemptions=0,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView], now_s: float = 0.0) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=1, now_s=now_s, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(**config: Any) -> MlfqPolicy:
    return MlfqPolicy(MlfqConfig(**{"quanta": (10, 20), "boost": None, **config}), CONTEXT)


def order(chosen: MlfqPolicy, view: StepView) -> list[int]:
    return list(chosen.order_running(view))


def test_level_is_by_tokens_computed_and_emitted() -> None:
    """Quanta of 10 and 20: the top up to 9 tokens, the next up to 29, then the last. Arrival decides within one."""
    service = {1: 30, 2: 10, 3: 9, 4: 0, 5: 29, 6: 99}
    running = [request(one, computed) for one, computed in service.items()]
    assert order(policy(), step(running, [])) == [3, 4, 2, 5, 1, 6]
    emitted = [request(1, 9, output=1), request(2, 9, arrival_s=1.0)]
    assert order(policy(), step(emitted, [])) == [2, 1]


def test_computing_again_after_a_preemption_costs_nothing() -> None:
    chosen = policy()
    order(chosen, step([request(1, 12), request(2, 9, arrival_s=1.0)], []))
    order(chosen, step([request(2, 9, arrival_s=1.0)], [request(1, 0)]))
    assert order(chosen, step([request(1, 3), request(2, 9, arrival_s=1.0)], [])) == [2, 1]  # 12 at most, not 15
    order(chosen, step([request(1, 12), request(2, 29, arrival_s=1.0)], []))
    assert order(chosen, step([request(1, 29), request(2, 30, arrival_s=1.0)], [])) == [1, 2]


def test_boost_returns_all_to_the_top_in_arrival_order() -> None:
    chosen = policy(boost="10s")
    running = [request(1, 90), request(2, 5, arrival_s=1.0), request(3, 15, arrival_s=2.0)]
    assert order(chosen, step(running, [], now_s=5.0)) == [2, 3, 1]
    assert order(chosen, step(running, [], now_s=14.9)) == [2, 3, 1]
    assert order(chosen, step(running, [], now_s=15.0)) == [1, 2, 3]
    used = [request(1, 100), request(2, 14, arrival_s=1.0), request(3, 15, arrival_s=2.0)]
    assert order(chosen, step(used, [], now_s=16.0)) == [2, 3, 1]  # 10, 9 and 0 since


@pytest.mark.parametrize("mode", ["pause", "offload", "recompute"])
def test_waiting_request_preempts_strictly_lower_levels_the_last_in_order_first(mode: Any) -> None:
    chosen, new = policy(preemption=mode), request(9, arrival_s=5.0)
    running = [request(1, 30), request(2, 12), request(3, 5, arrival_s=9.0), request(4, 15, arrival_s=1.0)]
    view = step(running, [new])
    order(chosen, view)
    assert chosen.on_blocked(view, new, "seat") == Victims((1, 4, 2), mode)
    assert chosen.on_blocked(view, new, "kv") == Victims((1, 4, 2), "recompute")
    assert chosen.admit(new, 10_000) == Accept()


def test_equal_levels_do_not_preempt_to_start_but_give_kv_to_earlier_ones_that_run() -> None:
    early, late = request(1, 5), request(2, 5, arrival_s=1.0)
    assert policy().on_blocked(step([late], [early]), early, "seat") == Stop()
    assert policy().on_blocked(step([late, early], []), early, "kv") == Victims((2,), "recompute")
    assert policy().on_blocked(step([late, early], []), late, "kv") == Stop()


SERVICE = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 7.0])), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SERVICE)
def test_preemption_goes_one_way_as_long_as_no_quantum_is_used_up(parts: list[tuple[int, float]]) -> None:
    chosen, preempts = policy(), set[tuple[int, int]]()
    views = [request(index, computed, arrival_s=arrival) for index, (computed, arrival) in enumerate(parts)]
    order(chosen, step(views, []))
    for a, b in permutations(views, 2):
        for view in (step([b], [a]), step([a, b], [])):
            if isinstance(chosen.on_blocked(view, a, "kv"), Victims):
                preempts.add((a.sequence_id, b.sequence_id))
    assert all((b, a) not in preempts for a, b in preempts)


def turns_of(place: World, max_steps: int = 400, **config: Any) -> list[Turn]:
    turns: list[Turn] = []
    play(place, PolicyScheduler(policy(**config)), turns.append, max_steps)
    return turns


def stream() -> World:
    """One seat, a long request, and a short one every two steps, which is what each of them takes."""
    jobs = [Job(sequence_id=0, arrival=0, num_prompt=4, max_new=40)]
    jobs += [Job(sequence_id=1 + number, arrival=2 * number, num_prompt=3, max_new=2) for number in range(150)]
    return world(jobs, num_seats=1)


def test_long_request_is_paused_for_short_ones_and_finishes_only_if_boosted() -> None:
    """A quantum of 10 and no boost: 0 is never seen again while short ones come. Boosts give it 10 tokens at a time."""
    place = stream()
    turns = turns_of(place, max_steps=300)
    assert {one for turn in turns for one in turn.plan.paused} == {0}
    assert 0 in place.unfinished
    place = stream()
    turns = turns_of(place, max_steps=300, boost="195ms")
    assert 0 not in place.unfinished
    assert not any(turn.plan.preempted for turn in turns)  # paused, it computes nothing again


def test_who_waits_at_a_boost_is_overtaken_by_no_later_arrival_from_then_on() -> None:
    boosts = 0
    for seed in range(8):
        due: set[int] = set()
        for turn in turns_of(busy_world(seed), boost="195ms"):
            if turn.view.step and turn.view.step % 20 == 0:
                due = {one.sequence_id for one in turn.view.waiting}
                boosts += len(due)
            planned = {item.sequence_id for item in turn.plan.items}
            rank = {one.sequence_id: (one.arrival_s, one.sequence_id) for one in turn.view.waiting}
            started = [rank[one] for one in rank if one in planned]
            left = [rank[one] for one in due if one in rank and one not in planned]
            assert max(started, default=(-1.0, 0)) < min(left, default=(1e9, 0))
            due &= set(rank) - planned  # once it runs it may fall again
    assert boosts > 10


@pytest.mark.parametrize("preemption", ["pause", "offload", "recompute"])
def test_everybody_finishes_in_each_mode(preemption: Any) -> None:
    lost = {"pause": 0, "offload": 0, "recompute": 0}
    for seed in range(8):
        place = busy_world(seed)
        for turn in turns_of(place, preemption=preemption):
            lost["pause"] += len(turn.plan.paused)
            lost["offload"] += len(turn.plan.offloaded)
            lost["recompute"] += len(turn.plan.preempted)
        assert not place.unfinished
    assert lost[preemption] > 0
    assert all(count == 0 for mode, count in lost.items() if mode not in (preemption, "recompute"))


@pytest.mark.parametrize("wrong", [{"quanta": ()}, {"quanta": (0, 5)}, {"preemption": "swap"}, {"boost": "soon"}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        MlfqConfig.model_validate(wrong)
