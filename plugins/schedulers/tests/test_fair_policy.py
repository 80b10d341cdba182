"""Fair shares between tenants: closed examples of the counters, and the paper's bound on whole runs.

Authority: Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588), algorithm 2 and theorem 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import Budget, Event, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Stop, Victims
from pluglm_schedulers.fair import FairConfig, FairPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(sequence_id: int, tenant: str, prompt: int = 10, arrival_s: float = 0.0) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant=tenant, priority=0, arrival_s=arrival_s,
        num_prompt=prompt, num_known=prompt, num_computed=0, num_drafts=0, num_output=0, max_new_tokens=8,
        num_preemptions=0,
    )  # fmt: skip


class Desk:
    """A policy as the engine uses it: requests arrive, then steps are planned over who runs and who waits."""

    def __init__(self, **config: Any) -> None:
        self.policy = FairPolicy(FairConfig(**config), CONTEXT)

    def arrive(self, *requests: RequestView) -> None:
        for one in requests:
            assert self.policy.admit(one, 10_000) == Accept()

    def plan(self, running: list[RequestView], waiting: list[RequestView]) -> tuple[list[int], list[int]]:
        budget = Budget(num_tokens=64, num_seats=4)
        view = StepView(step=1, now_s=100.0, budget=budget, running=tuple(running), waiting=tuple(waiting))
        answers = [(list(self.policy.order_running(view)), list(self.policy.order_waiting(view))) for _ in range(2)]
        assert answers[0] == answers[1]  # to be asked again changes nothing
        return answers[0]

    def emit(self, one: RequestView, count: int, last: bool = False) -> None:
        reason = "length" if last else None
        self.policy.on_event(Event(request_id=one.request_id, token_ids=(5,) * count, finish_reason=reason))


def test_tenants_take_turns_by_prompt_length_in_one_step() -> None:
    """Counters by hand (a, b): take a1, (10, 0); b4, (10, 4); b5, (10, 8); b6, (10, 12); a2, (20, 12); b7; a3."""
    waiting = [request(number, "a", 10) for number in (1, 2, 3)] + [request(number, "b", 4) for number in (4, 5, 6, 7)]
    desk = Desk()
    desk.arrive(*waiting)
    assert desk.plan([], waiting)[1] == [1, 4, 5, 6, 2, 7, 3]


def test_output_is_charged_as_it_comes_and_twice_a_prompt_token() -> None:
    """After a step, a has 10 + 2 * 3 = 16 and b 17 + 0: a goes first. One more token of a, 18: b does."""
    a, b, a_next, b_next = request(1, "a", 10), request(2, "b", 17), request(3, "a"), request(4, "b")
    desk = Desk()
    desk.arrive(a, b, a_next, b_next)
    desk.plan([], [a, b, a_next, b_next])
    desk.emit(a, 3)
    assert desk.plan([b, a], [a_next, b_next]) == ([1, 2], [3, 4])
    desk.emit(a, 1)
    assert desk.plan([b, a], [a_next, b_next]) == ([2, 1], [4, 3])


def test_weights_are_those_of_the_config() -> None:
    """0.5 * 10 + 4 * 1 = 9 of a against 0.5 * 17 = 8.5 of b."""
    a, b, a_next, b_next = request(1, "a", 10), request(2, "b", 17), request(3, "a"), request(4, "b")
    desk = Desk(input_weight=0.5, output_weight=4)
    desk.arrive(a, b, a_next, b_next)
    desk.plan([], [a, b, a_next, b_next])
    desk.emit(a, 1)
    assert desk.plan([b, a], [a_next, b_next])[1] == [4, 3]


def test_one_tenant_is_first_come_first_served() -> None:
    waiting = [request(3, "a", arrival_s=2.0), request(7, "a", arrival_s=1.0), request(1, "a", arrival_s=2.0)]
    desk = Desk()
    desk.arrive(*waiting)
    assert desk.plan([], waiting)[1] == [7, 1, 3]


def test_preempted_request_is_not_charged_again() -> None:
    a, b, other = request(1, "a", 10), request(2, "b", 12), request(3, "a", 1, arrival_s=5.0)
    desk = Desk()
    desk.arrive(a, b, other)
    desk.plan([], [a, b, other])
    desk.plan([a, b], [other])  # a 10, b 12
    assert desk.plan([b], [a, other])[1] == [1, 3]
    assert desk.plan([a, b], [other])[0] == [1, 2]  # 20 and 12 if it were


def test_tenant_that_returns_is_lifted_to_the_least_of_those_that_wait() -> None:
    """b was idle while a was served 100; it comes in at 100, so a10 and b11 alternate and b does not go first alone."""
    served, queued = request(1, "a", 100), [request(number, "a", 10) for number in (10, 20)]
    desk = Desk()
    desk.arrive(served, *queued)
    desk.plan([], [served, *queued])
    desk.plan([served], queued)
    late = [request(number, "b", 10, arrival_s=1.0) for number in (11, 12, 13)]
    desk.arrive(*late)
    assert desk.plan([served], [*queued, *late])[1] == [10, 11, 20, 12, 13]


def test_after_an_empty_queue_the_level_is_that_of_the_tenant_that_left_last() -> None:
    """a ran alone up to 10 + 2 * 30 = 70; both come again: b starts at 70 as well, so the arrival decides."""
    alone = request(1, "a", 10)
    desk = Desk()
    desk.arrive(alone)
    desk.plan([], [alone])
    desk.emit(alone, 30, last=True)
    again = [request(2, "a", 10), request(3, "b", 10, arrival_s=1.0), request(4, "b", 10, arrival_s=1.0)]
    desk.arrive(*again)
    assert desk.plan([], again)[1] == [2, 3, 4]


def test_preemption_follows_arrival_and_hits_the_most_served_tenant_first() -> None:
    a, b, c = request(1, "a", 10), request(2, "b", 30, arrival_s=1.0), request(3, "c", 20, arrival_s=2.0)
    desk = Desk()
    desk.arrive(a, b, c)
    desk.plan([], [a, b, c])
    desk.plan([a, b, c], [])
    view = StepView(
        step=1, now_s=3.0, budget=Budget(num_tokens=9, num_seats=3), running=(a, b, c), waiting=(request(4, "d"),)
    )
    assert desk.policy.on_blocked(view, a, "kv") == Victims((2, 3))
    assert desk.policy.on_blocked(view, b, "kv") == Victims((3,))
    assert desk.policy.on_blocked(view, c, "kv") == Stop()
    assert desk.policy.on_blocked(view, view.waiting[0], "seat") == Stop()


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
def test_weights_are_positive_and_finite(wrong: float) -> None:
    with pytest.raises(ValidationError):
        FairConfig(output_weight=wrong)


PROMPT, SEATS = 6, 3
LENGTHS = {"heavy": 24, "light": 5}  # output tokens of a request
NUM_REQUESTS = {"heavy": 40, "light": 120}


def gaps(engine: Engine) -> Iterator[float]:
    """Heavy's service less light's after each step, 1 a prompt token and 2 an output token, while both queue."""
    owner, waiting = {}, {}
    for tenant, count in NUM_REQUESTS.items():  # all of heavy's arrive before any of light's
        params = SamplingParams(temperature=0, max_tokens=LENGTHS[tenant], ignore_eos=True)
        for _ in range(count):
            owner[engine.submit({"prompt_token_ids": [9] * PROMPT}, params, tenant=tenant)] = tenant
    core: Any = engine._core
    requests = {name: lanes.live[0] for name, lanes in core.roster.requests.items()}
    while True:
        engine.step()
        waiting = {owner[one.request.request_id] for one in core.roster.waiting.values()}
        if len(waiting) < 2:
            return
        service = dict.fromkeys(NUM_REQUESTS, 0.0)
        for name, sequence in requests.items():
            service[owner[name]] += 2 * sequence.num_output + (PROMPT if sequence.num_computed else 0)
        yield service["heavy"] - service["light"]


def test_two_backlogged_tenants_get_equal_service_within_the_bound_of_the_paper(
    make_engine: Callable[..., Engine],
) -> None:
    """Theorem 4.4: 2 * max(input_weight * longest prompt, output_weight * tokens of a running batch)."""
    bound = 2 * max(1 * PROMPT, 2 * SEATS * (PROMPT + max(LENGTHS.values())))
    with make_engine("fair", seats=SEATS, step_tokens=16) as engine:
        found = list(gaps(engine))
    assert len(found) > 200  # both were backlogged for long
    assert max(map(abs, found)) <= bound
    with make_engine("fcfs", seats=SEATS, step_tokens=16) as engine:
        assert max(map(abs, gaps(engine))) > 5 * bound


def test_idle_tenant_saves_up_no_credit(make_engine: Callable[..., Engine]) -> None:
    """Busy is served alone for long; from the moment that idle returns, both get the same number of turns."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = {"prompt_token_ids": [9] * PROMPT}
    with make_engine("fair", seats=1) as engine:
        busy = [engine.submit(prompt, params, tenant="busy") for _ in range(60)]
        engine.submit(prompt, params, tenant="idle")
        for _ in range(40 * 10):
            engine.step()
        before = [engine._core.is_live(one) for one in busy].count(False)
        idle = [engine.submit(prompt, params, tenant="idle") for _ in range(20)]
        for _ in range(20 * 10):
            engine.step()
        busy_turns = [engine._core.is_live(one) for one in busy].count(False) - before
        idle_turns = [engine._core.is_live(one) for one in idle].count(False)
    assert before == 39  # of 40 turns one was idle's, at the start
    assert (busy_turns, idle_turns) == (10, 10)


def test_tenants_that_are_gone_are_forgotten(make_engine: Callable[..., Engine]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with make_engine("fair", seats=2) as engine:
        counters = engine._core.parts.policy._counters  # type: ignore[union-attr]
        for number in range(60):
            name = engine.submit({"prompt_token_ids": [3] * (1 + number % 7)}, params, tenant=f"tenant {number}")
            engine.step()
            if number % 9 == 0:
                engine.cancel(name)
            assert len(counters._service) < 12
        while engine._core.roster.requests:
            engine.step()
        list(engine.events(engine.submit({"prompt_token_ids": [3]}, params, tenant="last")))
        assert not counters._live
        assert len(counters._service) < 12
