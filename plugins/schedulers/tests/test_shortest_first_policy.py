"""Closed examples of shortest remaining work first; sizes and crossing points are computed by hand in each test."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm.kernel.interfaces.scheduler import Accept, Stop, Victims
from pluglm_schedulers.shortest_first import ShortestFirstConfig, ShortestFirstPolicy

CONTEXT: Any = None  # the policy reads nothing of the run


def request(
    sequence_id: int, prompt: int, new: int, *, computed: int = 0, output: int = 0, arrival_s: float = 0.0
) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, arrival_s=arrival_s,
        num_prompt=prompt, num_known=prompt + output, num_computed=computed, num_drafts=0, num_output=output,
        max_new_tokens=new, num_preemptions=0,
    )  # fmt: skip


def step(running: list[RequestView], waiting: list[RequestView]) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=1, now_s=100.0, budget=budget, running=tuple(running), waiting=tuple(waiting))


def policy(ageing: Any = None) -> ShortestFirstPolicy:
    return ShortestFirstPolicy(ShortestFirstConfig(ageing=ageing), CONTEXT)


def test_waiting_order_is_prompt_plus_wanted_then_arrival_then_sequence_id() -> None:
    waiting = [request(1, 30, 10), request(2, 4, 35, arrival_s=9.0), request(4, 20, 20), request(3, 1, 39)]
    assert list(policy().order_waiting(step([], waiting))) == [2, 1, 3, 4]  # 39, then 40 three times


def test_running_order_is_what_is_left_decodes_first() -> None:
    # Decodes: 4 + 80 - 70 computed = 14 left; 5 + 20 - 9 = 16. Prompts: 100 + 10 - 95 = 15; 8 + 8 - 0 = 16.
    running = [
        request(1, 100, 10, computed=95),
        request(2, 5, 20, computed=9, output=5),
        request(3, 8, 8, arrival_s=1.0),
        request(4, 4, 80, computed=70, output=67),
    ]
    assert list(policy().order_running(step(running, []))) == [4, 2, 1, 3]


def test_preempted_request_is_as_long_as_it_was_at_first() -> None:
    waiting = [request(1, 10, 20, computed=0, output=15), request(2, 10, 19), request(3, 10, 21)]
    assert list(policy().order_waiting(step([], waiting))) == [2, 1, 3]


def test_drafts_are_no_work() -> None:
    drafted = RequestView(
        sequence_id=1, request_id="r1", tenant="", priority=0, arrival_s=1.0, num_prompt=4, num_known=6, num_computed=5,
        num_drafts=4, num_output=2, max_new_tokens=8, num_preemptions=0,
    )  # fmt: skip
    equal = request(2, 4, 8, computed=5, output=2, arrival_s=0.0)
    assert list(policy().order_running(step([drafted, equal], []))) == [2, 1]


def test_ageing_crosses_at_the_point_computed_by_hand() -> None:
    # 100 tokens against 10, half a second a token: the long one is ahead of what arrives more than 45 s after it.
    long = request(1, 60, 40)
    for arrival, expected in ((44.0, [2, 1]), (45.0, [1, 2]), (46.0, [1, 2])):
        short = request(2, 6, 4, arrival_s=arrival)
        assert list(policy("500ms").order_waiting(step([], [short, long]))) == expected
        assert list(policy(0).order_waiting(step([], [short, long]))) == [2, 1]


def test_waiting_request_never_preempts_even_a_longer_one() -> None:
    short, long = request(1, 1, 1), request(2, 50, 50, computed=50)
    for need in ("kv", "seat"):
        assert policy().on_blocked(step([long], [short]), short, need) == Stop()


def test_running_request_takes_kv_from_those_behind_it_most_left_first() -> None:
    a = request(1, 10, 10, computed=10, output=1)
    almost_done = request(2, 100, 10, computed=108, output=9)  # 110 in all, 2 left
    halfway = request(3, 40, 40, computed=50, output=11)  # 80 in all, 30 left
    shorter = request(4, 5, 5, computed=5, output=1)
    assert policy().on_blocked(step([almost_done, shorter, a, halfway], []), a, "kv") == Victims((3, 2))
    assert policy().on_blocked(step([almost_done, shorter], []), almost_done, "kv") == Stop()
    assert policy().admit(a, 10_000) == Accept()


SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 19), st.sampled_from([0.0, 7.0, 40.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=2, max_size=6), st.integers(0, 19), st.sampled_from([None, "100ms", 2]))
def test_preemption_never_goes_both_ways_whatever_was_computed_in_between(
    parts: list[tuple[int, int, int, float]], later: int, ageing: Any
) -> None:
    chosen = policy(ageing)
    preempts: set[tuple[int, int]] = set()
    for progress in (0, later):
        running = [
            request(index, prompt, new, computed=min(computed + progress * index, prompt), arrival_s=arrival)
            for index, (prompt, new, computed, arrival) in enumerate(parts)
        ]
        for a, b in permutations(running, 2):
            answer = chosen.on_blocked(step([a, b], []), a, "kv")
            if isinstance(answer, Victims) and b.sequence_id in answer.sequence_ids:
                preempts.add((a.sequence_id, b.sequence_id))
    assert all((b, a) not in preempts for a, b in preempts)


def finished_before_the_long_one(engine: Engine, num_short: int) -> int:
    """One seat; a long request, and a short one with every step of 10 ms. How many short ones end before it does."""
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.submit({"prompt_token_ids": [7] * 40}, long, request_id="long")
    submitted = []
    while engine._core.is_live("long") and len(submitted) < num_short:
        submitted.append(engine.submit({"prompt_token_ids": [5, 6]}, short))
        engine.step()
    return sum(not engine._core.is_live(one) for one in submitted)


def test_long_request_finishes_though_short_ones_keep_arriving(make_engine: Callable[..., Engine]) -> None:
    """60 tokens against 3, 15 ms a token: those that arrive within 57 * 15 ms = 85.5 steps of 10 ms go first."""
    with make_engine({"use": "shortest_first", "ageing": "15ms"}, seats=1) as engine:
        assert finished_before_the_long_one(engine, 300) == 86
        assert not engine._core.is_live("long")


def test_without_ageing_the_same_long_request_waits_for_ever(make_engine: Callable[..., Engine]) -> None:
    with make_engine({"use": "shortest_first", "ageing": None}, seats=1) as engine:
        assert finished_before_the_long_one(engine, 300) == 300
        assert engine._core.is_live("long")


@pytest.mark.parametrize("num_blocks", [24, 40])
def test_full_pool_preempts_and_everybody_finishes(make_engine: Callable[..., Engine], num_blocks: int) -> None:
    with make_engine("shortest_first", seats=6, step_tokens=16, num_blocks=num_blocks) as engine:
        prompts = [{"prompt_token_ids": [1 + index] * (3 + 7 * index % 30)} for index in range(12)]
        params = [SamplingParams(temperature=0, max_tokens=8 + 5 * index % 40, ignore_eos=True) for index in range(12)]
        outputs = engine.generate(prompts, params)
        assert [output.error for output in outputs] == [None] * 12
        assert [len(output.token_ids) for output in outputs] == [8 + 5 * index % 40 for index in range(12)]
        preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
        assert sum(preemptions) > 0
        assert engine._core.kv.capacity().held_blocks == 0
