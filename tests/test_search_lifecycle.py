"""A request under a search: what the door says, what the caller sees, and how it ends before its time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beam_cases import beam_params, found_beams
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import RequestError

PROMPT = [5, 6, 7]
WIDTH, MAX_TOKENS = 4, 8
SEARCHED = beam_params(WIDTH, 3, MAX_TOKENS, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    config = fake_config(tiny_model, search="beam", kv={"use": "paged", "block_size": 2}, engine={"max_num_seqs": 2})
    with Engine.from_config(config) as engine:
        yield engine


def test_nothing_is_streamed_before_the_end(engine: Engine) -> None:
    chunks = list(engine.stream(ids(*PROMPT), SEARCHED))
    assert [one.lane for one in chunks] == [0, 1, 2]
    assert [one.lane_finish_reason for one in chunks] == ["length"] * 3
    assert [one.finish_reason for one in chunks] == [None, None, "length"]
    for one in chunks:
        assert len(one.token_ids) == MAX_TOKENS
        assert one.text == engine.tokenizer.decode(list(one.token_ids))
    require_idle(engine)


def test_what_the_metrics_count(engine: Engine) -> None:
    output = engine.generate(ids(*PROMPT), SEARCHED)[0]
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_prompt_tokens == len(PROMPT)
    assert metrics.num_output_tokens == 3 * MAX_TOKENS
    assert metrics.first_token_s == metrics.finished_s
    assert output.seed is not None


def test_lanes_that_need_each_other_find_seats_two_at_a_time(engine: Engine) -> None:
    """Four lanes on two seats: a step for the prompt, then two steps for each further token."""
    steps = Steps(engine)
    steps.add("a", PROMPT, SEARCHED)
    steps.finish()
    assert steps.count - 1 == 1 + 2 * (MAX_TOKENS - 1)


@pytest.mark.parametrize("num_steps", range(2 * MAX_TOKENS))
def test_cancelled_at_any_step(engine: Engine, num_steps: int) -> None:
    """One terminal event, without a token, and its mate's tokens are what they would be."""
    steps = Steps(engine)
    steps.add("a", PROMPT, beam_params(WIDTH, 3, 2 * MAX_TOKENS, ignore_eos=True))
    steps.add("mate", [1, 2], GREEDY)
    steps.step(num_steps)
    assert steps.core.cancel("a")
    steps.step()
    end = steps.end("a")
    assert (end.finish_reason, end.token_ids, end.text) == ("cancelled", (), "")
    assert end.metrics is not None
    assert end.metrics.num_output_tokens == 0
    steps.finish()
    assert steps.tokens("mate") == fake_tokens([1, 2], 8, vocab_size(engine))
    require_idle(engine)


def test_deadline(engine: Engine) -> None:
    """A step of the fake backend takes 10 ms and 0.1 ms for each token."""
    steps = Steps(engine)
    steps.add("a", PROMPT, SEARCHED, deadline_s=0.065)
    steps.finish()
    assert (steps.end("a").finish_reason, steps.end("a").error) == ("deadline", None)
    assert len(steps.events) == 1
    require_idle(engine)


def test_closing_the_engine_ends_it(tiny_model: Path) -> None:
    engine = Engine.from_config(fake_config(tiny_model, search="beam"))
    name = engine.submit(ids(*PROMPT), SEARCHED)
    for _ in range(3):
        engine.step()
    engine.close()
    assert [one.finish_reason for one in engine.events(name)] == ["cancelled"]
    require_idle(engine)


def test_a_dropped_stream_cancels_it(engine: Engine) -> None:
    chunks = engine.stream(ids(*PROMPT), SEARCHED)
    engine.step()
    chunks.close()
    engine.step()
    require_idle(engine)


def test_a_search_beside_drawn_outputs(engine: Engine) -> None:
    """Requests without `search` are drawn as ever, also several at once."""
    several = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2)
    alone = engine.generate(ids(*PROMPT), SEARCHED)[0]
    outputs = engine.generate([ids(1, 2), ids(*PROMPT), ids(3)], [several, SEARCHED, GREEDY])
    size = vocab_size(engine)
    assert found_beams(outputs[0]) == [fake_tokens([1, 2], 8, size)] * 2
    assert found_beams(outputs[1]) == found_beams(alone)
    assert outputs[2].token_ids == fake_tokens([3], 8, size)


def test_lanes_do_not_fill_the_queue(tiny_model: Path) -> None:
    """Nor do copies of a lane that had lost its KV, of which nothing is computed."""
    kv = {"use": "paged", "block_size": 1, "num_blocks": 12}
    limits = {"max_num_seqs": 1, "max_waiting_requests": 1, "max_waiting_tokens": 4}
    with Engine.from_config(fake_config(tiny_model, search="beam", kv=kv, engine=limits)) as engine:
        steps = Steps(engine)
        steps.add("a", PROMPT, SEARCHED)
        lanes = steps.core.roster.requests["a"].live
        steps.until(lambda: any(one.num_output and not one.num_computed + one.num_preemptions for one in lanes))
        steps.add("b", PROMPT, GREEDY)
        steps.finish()
        assert steps.metrics("a").num_preemptions > 0
        assert steps.end("b").finish_reason == "length"
        require_idle(engine)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 1.0}, "a search draws nothing; set temperature to 0"),
        ({"stop": ("x",)}, "a search takes no stop"),
        ({"stop_token_ids": (3,)}, "a search takes no stop_token_ids"),
        ({"logprobs": 2}, "a search takes no logprobs"),
        ({"grammar": {"regex": "a"}}, "a search takes no grammar"),
        ({"repetition_penalty": 1.2}, "a search takes no repetition_penalty"),
        ({"frequency_penalty": 0.5}, "a search takes no frequency_penalty"),
        ({"presence_penalty": -0.5}, "a search takes no presence_penalty"),
        ({"search": {}}, r"search\.width must be an integer from 1 \(n\) to 64"),
        ({"search": {"width": 2}, "n": 3}, r"search\.width must be an integer from 3 \(n\) to 64"),
        ({"search": {"width": 4, "beams": 4}}, "search: unknown option 'beams'"),
    ],
)
def test_what_is_refused_at_the_door(engine: Engine, changes: dict[str, Any], says: str) -> None:
    params = SamplingParams(**{"temperature": 0, "search": {"width": 4}, **changes})
    with pytest.raises(RequestError, match=f"request 'a': {says}"):
        engine.submit(ids(*PROMPT), params, request_id="a")
    require_idle(engine)


def test_a_search_that_is_not_configured(tiny_model: Path) -> None:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        with pytest.raises(RequestError, match=r"none is configured; add `search: {use: beam}`"):
            engine.submit(ids(*PROMPT), SEARCHED)
        require_idle(engine)


def test_more_outputs_than_there_are(tiny_model: Path) -> None:
    """320 ids make 320 outputs of one token; the request fails, and nobody else."""
    with Engine.from_config(fake_config(tiny_model, search={"use": "beam", "max_width": 1024})) as wide:
        outputs = wide.generate([ids(*PROMPT), ids(1, 2)], [beam_params(1000, 1000, 1), GREEDY])
        assert outputs[0].finish_reason == "error"
        assert f"too few outputs: {vocab_size(wide)} of up to 1 tokens" in str(outputs[0].error)
        assert outputs[1].token_ids == fake_tokens([1, 2], 8, vocab_size(wide))
        require_idle(wide)
