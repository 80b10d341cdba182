"""Step times by least squares: lines are recovered, and steps of which it is not known what they did do not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.core import Budget, CacheKey, RequestView, StepView
from pluglm_schedulers.step_time import StepTime, StepTimes

KEY = CacheKey(namespace=b"", token_ids=range(1000), limit=999)


def request(sequence_id: int, computed: int) -> RequestView:
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, arrival_s=0.0, num_prompt=10**6,
        num_known=10**6, num_computed=computed, num_drafts=0, num_output=0, max_new_tokens=8, num_preemptions=0,
    )  # fmt: skip


def view(number: int, now_s: float, *running: RequestView) -> StepView:
    budget = Budget(num_tokens=64, num_seats=4)
    return StepView(step=number, now_s=now_s, budget=budget, running=running, waiting=())


def observed(steps: list[tuple[int, float]]) -> StepTimes:
    """Of steps with so many tokens and seconds each, by one sequence."""
    times, computed, now_s = StepTimes(), 0, 5.0
    times.planning(view(0, now_s, request(1, 0)))
    for number, (tokens, seconds) in enumerate(steps):
        computed, now_s = computed + tokens, now_s + seconds
        times.planning(view(number + 1, now_s, request(1, computed)))
        times.planning(view(number + 1, now_s, request(1, computed)))  # asked twice
    return times


COUNTS = st.lists(st.integers(1, 2048), min_size=2, max_size=40)


@settings(max_examples=100, deadline=None)
@given(COUNTS, st.floats(0.0, 0.1), st.floats(0.0, 0.01))
def test_a_line_is_recovered(counts: list[int], step_s: float, token_s: float) -> None:
    found = observed([(count, step_s + token_s * count) for count in counts]).estimate()
    assert found is not None
    if max(counts) - min(counts) > 0.1 * max(counts):
        assert found.step_s == pytest.approx(step_s, abs=1e-6)
        assert found.token_s == pytest.approx(token_s, abs=1e-8)
    for count in counts:
        assert found.step_s + found.token_s * count == pytest.approx(step_s + token_s * count, abs=1e-3)


def test_equal_steps_are_all_step_and_no_token() -> None:
    assert observed([(7, 0.02)] * 30).estimate() == StepTime(pytest.approx(0.02), 0.0)


def test_neither_time_is_below_zero() -> None:
    assert observed([(10, 0.2), (20, 0.1)]).estimate() == StepTime(pytest.approx(0.15, rel=0.02), 0.0)
    found = observed([(10, 0.1), (100, 2.0)]).estimate()
    assert found is not None
    assert (found.step_s, found.token_s) == (pytest.approx(0.0, abs=1e-12), pytest.approx(2.1 / 110, rel=0.02))


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimes().estimate() is None
    assert observed([]).estimate() is None


def test_old_steps_fade() -> None:
    found = observed([(8, 1.0)] * 100 + [(8, 0.1)] * 400).estimate()
    assert found is not None
    assert found.step_s == pytest.approx(0.1, abs=0.001)


def test_steps_of_which_it_is_unknown_what_they_did_do_not_count() -> None:
    waiting = replace(request(2, 0), cache_key=KEY)
    pairs = {
        "a step is missing": (view(1, 1.0, request(1, 0)), view(3, 2.0, request(1, 9))),
        "somebody left": (view(1, 1.0, request(1, 0), request(2, 0)), view(2, 2.0, request(1, 9))),
        "it may have adopted": (view(1, 1.0, waiting), view(2, 2.0, request(2, 9))),
        "nothing was computed": (view(1, 1.0, request(1, 9)), view(2, 2.0, request(1, 9))),
        "only a loss": (view(1, 1.0, request(1, 9)), view(2, 2.0, request(1, 0))),
    }
    for why, (before, after) in pairs.items():
        times = StepTimes()
        times.planning(before)
        times.planning(after)
        assert times.estimate() is None, why
