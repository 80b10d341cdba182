"""Closed examples of strict priorities with ageing; crossing points are computed by hand in each test."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Stop, Victims
from pluglm_schedulers.priority import PriorityConfig, PriorityPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(sequence_id: int, priority: int, arrival_s: float = 0.0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=priority, arrival_s=arrival_s,
        num_prompt=4, num_known=4, num_computed=0, num_drafts=0, num_output=0, max_new_tokens=8, num_preemptions=0,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView], now_s: float = 100.0) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=1, now_s=now_s, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(ageing: Any = None) -> PriorityPolicy:
    return PriorityPolicy(PriorityConfig(ageing=ageing), CONTEXT)


def victims(answer: object) -> tuple[int, ...]:
    return answer.sequence_ids if isinstance(answer, Victims) else ()


def test_lower_number_first_then_arrival_then_sequence_id() -> None:
    shuffled = [request(1, 5), request(2, 0, 9.0), request(3, 0, 8.0), request(5, -1, 50.0), request(4, 5)]
    assert list(policy().order_waiting(step([], shuffled))) == [5, 3, 2, 1, 4]
    assert list(policy(0).order_running(step(shuffled, []))) == [5, 3, 2, 1, 4]


def test_ageing_crosses_at_the_point_computed_by_hand() -> None:
    # Three levels apart, 30 s a level: the old one is ahead of what arrives more than 90 s after it. At equality
    # (0 + 90/30 = 3 + 0/30) the earlier arrival wins.
    old = request(1, 3, 0.0)
    for arrival, expected in ((89.0, [2, 1]), (90.0, [1, 2]), (91.0, [1, 2])):
        assert list(policy("30s").order_waiting(step([], [request(2, 0, arrival), old]))) == expected


def test_order_does_not_depend_on_the_clock() -> None:
    waiting = [request(1, 3, 0.0), request(2, 0, 100.0), request(3, 1, 55.0)]
    orders = {tuple(policy("30s").order_waiting(step([], waiting, now))) for now in (100.0, 130.0, 1e6)}
    assert orders == {(3, 1, 2)}  # 1 + 55/30 = 2.83, 3 + 0, 0 + 100/30 = 3.33


@pytest.mark.parametrize("need", ["kv", "seat"])
def test_waiting_request_preempts_strictly_lower_ones_only_worst_first(need: Any) -> None:
    urgent = request(9, 1, 50.0)
    running = [request(1, 1, 60.0), request(2, 2), request(3, 5), request(4, 0), request(5, 5, 1.0)]
    assert policy().on_blocked(step(running, [urgent]), urgent, need) == Victims((5, 3, 2))


def test_equal_priority_does_not_preempt_to_start() -> None:
    early, late = request(1, 2, 0.0), request(2, 2, 500.0)
    for ageing in (None, "10s"):
        assert policy(ageing).on_blocked(step([late], [early]), early, "seat") == Stop()


def test_aged_request_neither_loses_its_seat_to_nor_takes_it_from_the_urgent_one_it_overtook() -> None:
    aged, urgent = request(1, 5, 0.0), request(2, 0, 1000.0)  # 5 levels in 10 s each: ahead after 50 s
    assert policy("10s").on_blocked(step([aged], [urgent]), urgent, "seat") == Stop()
    assert policy("10s").on_blocked(step([urgent], [aged]), aged, "seat") == Stop()
    assert policy().on_blocked(step([aged], [urgent]), urgent, "seat") == Victims((1,))


def test_running_request_takes_kv_from_those_behind_it_equals_included() -> None:
    running = [request(1, 1, 0.0), request(2, 1, 1.0), request(3, 4, 0.0), request(4, 0, 9.0)]
    assert policy().on_blocked(step(running, []), running[0], "kv") == Victims((3, 2))
    assert policy().on_blocked(step(running, []), running[2], "kv") == Stop()


REQUESTS = st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([0.0, 7.0, 40.0])), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([None, "10s", 20]))
def test_preemption_never_goes_both_ways_and_never_inverts_the_order(
    parts: list[tuple[int, float]], ageing: Any
) -> None:
    requests = [request(index, priority, arrival) for index, (priority, arrival) in enumerate(parts)]
    chosen = policy(ageing)
    order = list(chosen.order_waiting(step([], requests)))
    preempts: set[tuple[int, int]] = set()
    for a, b in permutations(requests, 2):
        for view in (step([b], [a]), step([a, b], [])):
            if b.sequence_id in victims(chosen.on_blocked(view, a, "kv")):
                preempts.add((a.sequence_id, b.sequence_id))
                assert order.index(a.sequence_id) < order.index(b.sequence_id)
    assert all((b, a) not in preempts for a, b in preempts)


@pytest.mark.parametrize(
    ("given_value", "seconds"),
    [("30s", 30.0), ("2m", 120.0), ("500ms", 0.5), ("1.5h", 5400.0), (30, 30.0), (0, 0.0), (None, None)],
)
def test_durations(given_value: Any, seconds: float | None) -> None:
    assert PriorityConfig(ageing=given_value).ageing == seconds


@pytest.mark.parametrize("wrong", ["soon", "-3s", -1, True, "30 parsecs", float("nan"), []])
def test_wrong_durations_are_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError, match="is not a duration"):
        PriorityConfig(ageing=wrong)


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="aging"):
        PriorityConfig.model_validate({"aging": 3})
