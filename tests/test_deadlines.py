"""A request ends by its deadline: what it has so far is kept, its memory is free, and nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, fake_tokens, ids, require_idle, vocab_size
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import RequestError

STEP_S, TOKEN_S = 0.01, 0.0001  # what the fake backend's clock takes by default
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    kv = {"use": "paged", "block_size": 4}
    with Engine.from_config(fake_config(tiny_model, kv=kv, engine={"max_num_seqs": 2})) as engine:
        yield engine


def starts_within(seconds: float) -> int:
    """Steps of PROMPT alone that begin no later than this: the first computes 3 tokens, each other one."""
    first = STEP_S + len(PROMPT) * TOKEN_S
    return 1 + math.floor((seconds - first) / (STEP_S + TOKEN_S) + 1)


def test_the_output_so_far_is_kept_and_the_memory_is_free(engine: Engine) -> None:
    steps = Steps(engine)
    steps.add("a", PROMPT, LONG, deadline_s=0.055)
    steps.finish()
    end = steps.end("a")
    assert end.finish_reason == "deadline"
    assert end.error is None
    assert steps.tokens("a") == fake_tokens(PROMPT, starts_within(0.055), vocab_size(engine))
    assert 1 < len(steps.tokens("a")) < LONG.max_tokens  # type: ignore[operator]
    assert end.metrics is not None
    assert end.metrics.num_output_tokens == len(steps.tokens("a"))
    assert 0.055 < end.metrics.finished_s - end.metrics.arrival_s < 0.055 + STEP_S + TOKEN_S
    require_idle(engine)


def test_it_ends_in_the_first_step_that_begins_late(engine: Engine) -> None:
    """Its blocks are free in that step already, for whoever waits for them."""
    steps = Steps(engine)
    steps.add("a", PROMPT, LONG, deadline_s=0.055)
    steps.step(starts_within(0.055))
    assert not steps.ends("a")
    assert steps.held > 0
    steps.step()
    assert steps.end("a").finish_reason == "deadline"
    assert steps.held == 0


def test_others_run_on(engine: Engine) -> None:
    steps = Steps(engine)
    steps.add("late", PROMPT, LONG, deadline_s=0.03)
    steps.add("mate", [4, 5], LONG)
    steps.finish()
    assert steps.end("late").finish_reason == "deadline"
    assert steps.end("mate").finish_reason == "length"
    assert steps.tokens("mate") == fake_tokens([4, 5], 60, vocab_size(engine))
    require_idle(engine)


def test_one_that_waits_ends_too(engine: Engine) -> None:
    steps = Steps(engine)
    for name in ("a", "b"):
        steps.add(name, PROMPT, LONG)
    steps.add("waits", [7], LONG, deadline_s=0.05)
    steps.finish()
    assert steps.end("waits").finish_reason == "deadline"
    assert steps.tokens("waits") == []
    assert steps.metrics("waits").first_token_s is None
    assert {steps.end(name).finish_reason for name in ("a", "b")} == {"length"}


def test_what_is_done_in_time_is_not_late_afterwards(engine: Engine) -> None:
    """Also when another request of its name runs by then."""
    steps = Steps(engine)
    steps.add("a", PROMPT, LONG.model_copy(update={"max_tokens": 2}), deadline_s=0.05)
    steps.finish()
    assert steps.end("a").finish_reason == "length"
    steps.events.clear()
    steps.add("a", PROMPT, LONG)
    steps.finish()
    assert steps.end("a").finish_reason == "length"


def test_the_last_token_may_come_in_the_step_that_runs_over(engine: Engine) -> None:
    """It was begun in time; its result is there when the engine looks at the clock again."""
    steps = Steps(engine)
    steps.add("a", PROMPT, LONG.model_copy(update={"max_tokens": starts_within(0.055)}), deadline_s=0.055)
    steps.finish()
    assert steps.end("a").finish_reason == "length"
    assert steps.metrics("a").finished_s - steps.metrics("a").arrival_s > 0.055


def test_all_outputs_of_a_request_end(engine: Engine) -> None:
    steps = Steps(engine)
    steps.add("a", PROMPT, LONG.model_copy(update={"n": 3}), deadline_s=0.1)
    steps.finish()
    assert steps.lane_ends("a") == dict.fromkeys(range(3), "deadline")
    assert steps.end("a").finish_reason == "deadline"
    lengths = [len(steps.tokens("a", lane)) for lane in range(3)]
    assert lengths[0] > 0
    assert steps.metrics("a").num_output_tokens == sum(lengths)
    require_idle(engine)


def test_through_the_public_engine(engine: Engine) -> None:
    events = list(engine.events(engine.submit(ids(*PROMPT), LONG, deadline_s=0.055)))
    assert events[-1].finish_reason == "deadline"
    chunks = list(engine.stream(ids(*PROMPT), LONG, deadline_s=0.055))
    assert chunks[-1].finish_reason == "deadline"
    assert chunks[-1].error is None
    streamed = [token for chunk in chunks for token in chunk.token_ids]
    assert streamed == [token for event in events for token in event.token_ids]
    require_idle(engine)


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan, "5", [1]])
def test_only_a_number_of_seconds_from_now_is_a_deadline(engine: Engine, wrong: Any) -> None:
    with pytest.raises(RequestError, match="deadline_s must be a number"):
        engine.submit(ids(1), LONG, deadline_s=wrong)
    require_idle(engine)
