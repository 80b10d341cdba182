"""Earliest deadline first: orders and estimates worked out by hand, and its overtaking bound on whole runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import Budget, Event, RequestView, StepView
from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.scheduler import Accept, Reject, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.testing.context import make_context
from pluglm.testing.simulation import Turn, busy_world, play
from pluglm_schedulers.deadline import DeadlineConfig, DeadlinePolicy


def request(
    sequence_id: int, due_s: float | None, *, arrival_s: float = 0.0, prompt: int = 4, computed: int = 0, new: int = 8
) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, arrival_s=arrival_s,
        num_prompt=prompt, num_known=prompt, num_computed=computed, num_drafts=0, num_output=0, max_new_tokens=new,
        num_preemptions=0, deadline_s=due_s,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView], number: int = 1, now_s: float = 0.0) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=number, now_s=now_s, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(**config: Any) -> DeadlinePolicy:
    """Of runs with 64 tokens a step."""
    return DeadlinePolicy(DeadlineConfig(**config), make_context(max_step_tokens=64))


def test_who_is_due_first_goes_first_then_arrival_then_sequence_id_and_no_deadline_is_last() -> None:
    some = [request(1, None), request(2, 9.0), request(3, 5.0, arrival_s=1.0), request(4, 5.0), request(5, 5.0)]
    some.append(request(6, None, arrival_s=-1.0))
    assert list(policy().order_waiting(step([], some))) == [4, 5, 3, 2, 6, 1]
    assert list(policy().order_running(step(some, []))) == [4, 5, 3, 2, 6, 1]


def test_waiting_request_preempts_who_is_due_strictly_later_and_only_pauses_for_a_seat() -> None:
    urgent = request(9, 5.0, arrival_s=3.0)
    running = [request(1, 5.0, arrival_s=4.0), request(2, 6.0), request(3, None), request(4, 4.0), request(5, 6.0)]
    view = step(running, [urgent])
    assert policy().on_blocked(view, urgent, "seat") == Victims((3, 5, 2), "pause")
    assert policy().on_blocked(view, urgent, "kv") == Victims((3, 5, 2), "recompute")


def test_equals_and_those_without_a_deadline_do_not_preempt_to_start() -> None:
    for due in (5.0, None):
        early, late = request(1, due, arrival_s=0.0), request(2, due, arrival_s=1.0)
        assert policy().on_blocked(step([late], [early]), early, "seat") == Stop()
        assert policy().on_blocked(step([early, late], []), early, "kv") == Victims((2,), "recompute")
        assert policy().on_blocked(step([early, late], []), late, "kv") == Stop()


DUE = st.tuples(st.sampled_from([None, 1.0, 2.0]), st.sampled_from([0.0, 7.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(DUE, min_size=2, max_size=6))
def test_preemption_never_goes_both_ways_and_never_inverts_the_order(parts: list[tuple[float | None, float]]) -> None:
    requests = [request(index, due, arrival_s=arrival) for index, (due, arrival) in enumerate(parts)]
    order = list(policy().order_waiting(step([], requests)))
    for a, b in permutations(requests, 2):
        for view in (step([b], [a]), step([a, b], [])):
            answer = policy().on_blocked(view, a, "kv")
            if isinstance(answer, Victims):
                assert answer.sequence_ids == (b.sequence_id,)
                assert order.index(a.sequence_id) < order.index(b.sequence_id)


def test_estimate_is_that_of_the_given_times() -> None:
    """100 tokens are two steps of 64, then 9 more: 11 steps of 10 ms and 109 tokens of 1 ms are 0.219 s."""
    chosen = policy(step_s="10ms", token_s="1ms")
    assert chosen.admit(request(1, 7.22, arrival_s=7.0, prompt=100, new=10), 0) == Accept()
    answer = policy(step_s="10ms", token_s="1ms").admit(request(1, 7.21, arrival_s=7.0, prompt=100, new=10), 0)
    assert answer == Reject(
        "it needs 0.219 s (11 steps of 0.01 s, 109 tokens of 0.001 s, 0 of them before its own) and its deadline is in "
        "0.210 s"
    )


@pytest.mark.parametrize(("share", "needed_s"), [(1.0, 0.219), (0.5, 0.164), (0.0, 0.120)])
def test_share_of_the_output_that_is_expected(share: float, needed_s: float) -> None:
    """Of 10 tokens: all, 5 (6 steps, 104 tokens), or the first (2 steps, 100 tokens)."""
    for left, kind in ((needed_s + 0.001, Accept), (needed_s - 0.001, Reject)):
        chosen = policy(step_s="10ms", token_s="1ms", output_share=share)
        assert isinstance(chosen.admit(request(1, left, prompt=100, new=10), 0), kind)


def test_prompts_that_are_due_earlier_come_before_its_own_and_decodes_cost_nothing_more() -> None:
    """30 + 50 tokens before its own 20: 2 steps of 64 and 100 tokens, so 0.120 s. Later ones do not count."""
    waiting = [request(1, 1.0, prompt=30), request(2, 9.0, prompt=900), request(3, None, prompt=900)]
    running = [request(4, 1.0, prompt=90, computed=40), request(5, 1.0, prompt=60, computed=59)]
    for left, kind in ((1.121, Accept), (1.119, Reject)):
        chosen = policy(step_s="10ms", token_s="1ms")
        chosen.order_running(step(running, waiting))
        one = request(6, left, arrival_s=1.0, prompt=20, new=1)
        assert isinstance(chosen.admit(one, 3), kind)


def test_those_that_came_or_ended_since_the_last_step_are_known() -> None:
    chosen = policy(step_s=0, token_s="1ms")
    assert chosen.admit(request(1, 1.0, prompt=300, new=1), 0) == Accept()
    assert isinstance(chosen.admit(request(2, 1.1, arrival_s=0.8, prompt=20, new=1), 0), Reject)  # 320 ms, 300 left
    chosen.on_event(Event(request_id="r1", finish_reason="cancelled"))
    assert chosen.admit(request(3, 1.1, arrival_s=0.8, prompt=20, new=1), 0) == Accept()


def test_without_an_observation_only_a_deadline_that_has_passed_is_refused() -> None:
    assert policy().admit(request(1, 1.001, arrival_s=1.0, prompt=1000), 0) == Accept()
    assert policy().admit(request(1, None, prompt=1000), 0) == Accept()
    assert policy().admit(request(1, 1.0, arrival_s=3.5), 0) == Reject("its deadline passed 2.500 s ago")


def test_estimate_is_read_off_the_views() -> None:
    """Steps of 10 and 20 tokens in 30 and 40 ms: 20 ms a step and 1 ms a token. 64 + 1 tokens need 2 of them."""
    chosen, ends = policy(), ((0, 0.0), (10, 0.030), (30, 0.070))
    for number, (computed, now_s) in enumerate(ends):
        list(chosen.order_running(step([request(1, None, prompt=100, computed=computed)], [], number, now_s)))
    for left, kind in ((0.106, Accept), (0.104, Reject)):
        assert isinstance(chosen.admit(request(2, left, prompt=64, new=2), 0), kind)


def test_only_one_of_the_two_times_is_refused() -> None:
    with pytest.raises(ValidationError, match="both, or neither"):
        DeadlineConfig(step_s=0.1)
    with pytest.raises(ValidationError, match="is not a duration"):
        DeadlineConfig(step_s="soon", token_s=0)


def test_engine_refuses_what_cannot_make_it_once_it_has_seen_steps_and_keeps_what_it_accepts(
    make_engine: Callable[..., Engine],
) -> None:
    """Steps of 10 ms: 50 tokens need 0.5 s."""
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6]}
    with make_engine("deadline") as engine:
        first = engine.submit(prompt, params)
        for _ in range(5):
            engine.step()
        with pytest.raises(RequestError, match=r"50 steps of 0\.01 s.*deadline is in 0\.490 s"):
            engine.submit(prompt, params, deadline_s=0.49)
        second = engine.submit(prompt, params, deadline_s=0.52)
        reasons = [[event.finish_reason for event in engine.events(one)][-1] for one in (second, first)]
    assert reasons == ["length", "length"]


@pytest.mark.parametrize("seed", range(8))
def test_nobody_starts_ahead_of_one_that_is_due_before(seed: int) -> None:
    """Whoever starts while others wait is due before all of them, ties by arrival."""
    place, turns = busy_world(seed), list[Turn]()
    play(place, PolicyScheduler(policy()), turns.append)
    assert not place.unfinished

    def rank(view: RequestView) -> tuple[float, float, int]:
        return float("inf") if view.deadline_s is None else view.deadline_s, view.arrival_s, view.sequence_id

    for turn in turns:
        planned = {item.sequence_id for item in turn.plan.items}
        started = [rank(one) for one in turn.view.waiting if one.sequence_id in planned]
        left = [rank(one) for one in turn.view.waiting if one.sequence_id not in planned]
        assert max(started, default=(-1.0, 0.0, 0)) < min(left, default=(float("inf"), float("inf"), 0))
