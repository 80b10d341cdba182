"""Closed examples of first come, first served; orders follow from the arrival times written in each test."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Stop, Victims
from pluglm_schedulers.fcfs import FcfsPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(sequence_id: int, arrival_s: float, priority: int = 0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=priority, arrival_s=arrival_s,
        num_prompt=4, num_known=4, num_computed=0, num_drafts=0, num_output=0, max_new_tokens=8, num_preemptions=0,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView]) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=1, now_s=100.0, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy() -> FcfsPolicy:
    return FcfsPolicy(ComponentConfig(), CONTEXT)


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
