"""How n outputs of one request end: each by its own stop or length, all together by anything else, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, ids, require_idle
from lane_cases import PROMPT, asking, expected_lane, expected_lanes
from step_cases import Steps

from pluglm import Engine

THREE = asking(n=3)
MATE = asking(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    kv = {"use": "paged", "block_size": 4}
    with Engine.from_config(fake_config(tiny_model, kv=kv, engine={"max_num_seqs": 3})) as engine:
        yield engine


@pytest.fixture
def steps(engine: Engine) -> Iterator[Steps]:
    steps = Steps(engine)
    yield steps
    steps.finish()
    require_idle(engine)


def lanes(steps: Steps, name: str, count: int = 3) -> list[list[int]]:
    return [steps.tokens(name, lane) for lane in range(count)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_cancelled_request_is_cancelled_in_all_its_lanes(steps: Steps, num_steps: int) -> None:
    """Before its first step, when its lanes wait for seats, and when they run. With a mate only two have a seat."""
    steps.add("mate", [4, 5], MATE)
    steps.add("a", PROMPT, THREE)
    steps.step(num_steps)
    num_lanes = 3 if num_steps else 1  # outputs that the prompt was not computed for never were
    assert steps.core.cancel("a")
    held_by_mate = len(steps.table("mate")) if num_steps else 0
    assert steps.held == held_by_mate
    steps.step()
    assert steps.end("a").finish_reason == "cancelled"
    assert steps.lane_ends("a") == dict.fromkeys(range(num_lanes), "cancelled")
    assert not steps.core.cancel("a")
    for lane, tokens in enumerate(lanes(steps, "a")):
        assert tokens == expected_lane(steps.engine, PROMPT, THREE, lane, len(tokens))
    steps.finish()
    assert steps.tokens("mate") == expected_lane(steps.engine, [4, 5], MATE, 0, 20)
    assert len(steps.ends("a")) == 1


def test_a_lane_that_ended_before_the_cancel_keeps_its_reason(steps: Steps) -> None:
    first = expected_lane(steps.engine, PROMPT, THREE, 1, 8)[0]
    steps.add("a", PROMPT, asking(n=3, stop_token_ids=[first]))
    steps.until(lambda: 1 in steps.lane_ends("a"))
    steps.core.cancel("a")
    steps.step()
    assert steps.lane_ends("a") == {0: "cancelled", 1: "stop", 2: "cancelled"}
    assert steps.end("a").finish_reason == "cancelled"


def test_lane_0_may_end_with_its_first_token_and_the_others_go_on(steps: Steps) -> None:
    """By then the others have only just been forked from it; its blocks must outlive it."""
    expected = expected_lanes(steps.engine, PROMPT, THREE)
    stop = expected[0][0]
    assert all(stop not in one for one in expected[1:])
    steps.add("a", PROMPT, asking(n=3, stop_token_ids=[stop]))
    steps.step()
    assert steps.lane_ends("a") == {0: "stop"}
    assert not steps.ends("a")
    steps.finish()
    assert lanes(steps, "a") == [[stop], *expected[1:]]
    assert steps.lane_ends("a") == {0: "stop", 1: "length", 2: "length"}
    assert steps.end("a").finish_reason == "length"  # of the lane that ended last


def test_the_output_reports_each_end_and_the_first_lane_s_as_its_own(engine: Engine) -> None:
    expected = expected_lanes(engine, PROMPT, THREE)
    stop = expected[1][3]
    output = engine.generate(ids(*PROMPT), asking(n=3, stop_token_ids=[stop]))[0]
    cut = [one[: one.index(stop) + 1] if stop in one else one for one in expected]
    assert [one.token_ids for one in output.completions] == cut
    for one in output.completions:
        assert (one.finish_reason, one.stop) == (("stop", stop) if stop in one.token_ids else ("length", None))
    first = output.completions[0]
    assert (output.token_ids, output.text) == (first.token_ids, first.text)
    assert (output.finish_reason, output.stop) == (first.finish_reason, first.stop)
    require_idle(engine)


def test_stop_strings_cut_each_lane_where_it_says_them(engine: Engine) -> None:
    whole = [one.text for one in engine.generate(ids(*PROMPT), THREE)[0].completions]
    for lane, text in enumerate(whole):
        stop = text[len(text) // 2 :][:2]
        output = engine.generate(ids(*PROMPT), asking(n=3, stop=[stop]))[0]
        assert [one.text for one in output.completions] == [one.partition(stop)[0] for one in whole]
        assert (output.completions[lane].finish_reason, output.completions[lane].stop) == ("stop", stop)
    require_idle(engine)


def test_an_ended_lane_gives_back_what_was_its_own(steps: Steps) -> None:
    """The prompt's first block stays as long as anybody shares it."""
    stop = expected_lane(steps.engine, PROMPT, THREE, 2, 8)[1]
    steps.add("a", PROMPT, asking(n=3, stop_token_ids=[stop]))
    steps.until(lambda: 2 in steps.lane_ends("a"))
    shared = set(steps.table("a", 0)) & set(steps.table("a", 1))
    assert len(shared) == 1
    assert steps.held == len({*steps.table("a", 0), *steps.table("a", 1)})
    steps.finish()
    assert steps.held == 0


def test_closing_the_engine_cancels_all_lanes(tiny_model: Path) -> None:
    engine = Engine.from_config(fake_config(tiny_model))
    name = engine.submit(ids(*PROMPT), THREE)
    for _ in range(3):
        engine.step()
    engine.close()
    events = list(engine.events(name))
    reasons = [event.lane_finish_reason for event in events if event.lane_finish_reason]
    assert reasons == ["cancelled"] * 3
    assert [event.finish_reason for event in events if event.finish_reason] == ["cancelled"]


def test_a_dropped_stream_frees_all_lanes_within_two_steps(engine: Engine) -> None:
    stream = engine.stream(ids(*PROMPT), asking(n=3, max_tokens=100))
    for _ in range(5):
        next(stream)
    assert engine._core.kv.capacity().held_blocks > 1
    stream.close()
    engine.step()
    engine.step()
    assert engine._core.kv.capacity().held_blocks == 0
    require_idle(engine)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, 1025])
def test_n_is_a_whole_number_of_outputs(wrong: Any) -> None:
    with pytest.raises(ValueError, match="n\n"):
        asking(n=wrong)
