"""A bounded queue refuses at once and says its numbers; max_tokens is lowered only for those who asked for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import RequestError


def make(model: Path, max_model_len: int | None = None, **slots: Any) -> Engine:
    path = {"path": str(model), "dtype": "float32", "max_model_len": max_model_len}
    return Engine.from_config(fake_config(model, model=path, **slots))


def test_a_full_queue_refuses_and_says_how_full_it_is(tiny_model: Path) -> None:
    with make(tiny_model, engine={"max_num_seqs": 1, "max_waiting_requests": 2}) as engine:
        steps = Steps(engine)
        steps.add("runs", [1], GREEDY)
        steps.step()
        steps.add("second", [2], GREEDY)
        steps.add("third", [3], GREEDY)
        says = r"^request 'd': 2 requests wait already, of at most 2 \(engine.max_waiting_requests\); try again later$"
        with pytest.raises(RequestError, match=says):
            steps.add("d", [4], GREEDY)
        steps.until(lambda: steps.running == ["second"])
        steps.add("d", [4], GREEDY)  # there is room again
        steps.finish()
        for name, prompt in (("runs", [1]), ("second", [2]), ("third", [3]), ("d", [4])):
            assert steps.tokens(name) == fake_tokens(prompt, 8, vocab_size(engine))
        require_idle(engine)


def test_a_queue_full_of_tokens_says_both_numbers(tiny_model: Path) -> None:
    with make(tiny_model, engine={"max_num_seqs": 1, "max_waiting_tokens": 10}) as engine:
        steps = Steps(engine)
        steps.add("runs", [1] * 10, GREEDY)
        steps.step()
        steps.add("six", [2] * 6, GREEDY)
        says = (
            r"^request 'five': 6 prompt tokens wait already and this one has 5, of at most 10 "
            r"\(engine.max_waiting_tokens\) in all; try again later$"
        )
        with pytest.raises(RequestError, match=says):
            steps.add("five", [3] * 5, GREEDY)
        steps.add("four", [3] * 4, GREEDY)  # exactly full
        steps.core.cancel("six")
        steps.add("five", [3] * 5, GREEDY)  # what left the queue counts no more
        steps.finish()
        assert steps.end("five").finish_reason == "length"
        require_idle(engine)


def test_only_those_that_never_ran_count(tiny_model: Path) -> None:
    """Further outputs of a request wait for seats, and so does one that was preempted: they are past the door."""
    kv = {"use": "paged", "block_size": 2, "num_blocks": 8}
    limits = {"max_num_seqs": 2, "max_waiting_requests": 1}
    with make(tiny_model, kv=kv, engine=limits) as engine:
        steps = Steps(engine)
        steps.add("four", [1], GREEDY.model_copy(update={"n": 4, "max_tokens": 4}))
        steps.step()
        assert len(steps.waiting) == 3
        steps.add("next", [2], GREEDY)
        steps.finish()
        steps.add("a", [1, 2, 3], GREEDY)
        steps.step()
        steps.add("b", [4, 5, 6], GREEDY)
        steps.until(lambda: any(one.num_preemptions for one in steps.core.roster.waiting.values()))
        steps.add("c", [7], GREEDY)
        steps.finish()
        assert {steps.end(name).finish_reason for name in ("four", "next", "a", "b", "c")} == {"length"}


def test_a_burst_is_cut_and_the_rest_runs(tiny_model: Path) -> None:
    with make(tiny_model, engine={"max_waiting_requests": 3}) as engine:
        outputs = engine.generate([ids(one) for one in range(5)], GREEDY)
        assert [output.finish_reason for output in outputs] == ["length"] * 3 + ["refused"] * 2
        for number, output in enumerate(outputs[:3]):
            assert output.token_ids == fake_tokens([number], 8, vocab_size(engine))
        assert outputs[4].error is not None
        assert "3 requests wait already, of at most 3" in outputs[4].error
        require_idle(engine)


def test_max_tokens_is_lowered_when_asked(tiny_model: Path) -> None:
    clipped = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, clip_max_tokens=True)
    with make(tiny_model, max_model_len=32) as engine:
        output = engine.generate(ids(*range(30)), clipped)[0]
        assert output.token_ids == fake_tokens(list(range(30)), 2, vocab_size(engine))
        assert output.finish_reason == "length"
        assert len(engine.generate(ids(*range(20)), clipped)[0].token_ids) == 10
        plain = engine.generate(ids(*range(30)), clipped.model_copy(update={"clip_max_tokens": False}))[0]
        assert plain.finish_reason == "refused"
        assert plain.error is not None
        assert "prompt 30 + max_tokens 10 = 40, the context holds 32 tokens" in plain.error
        assert "or set clip_max_tokens" in plain.error


def test_lowering_never_makes_room_for_a_prompt(tiny_model: Path) -> None:
    clipped = GREEDY.model_copy(update={"clip_max_tokens": True})
    kv = {"use": "paged", "block_size": 5, "num_blocks": 3}
    with make(tiny_model, kv=kv) as engine:
        refused = engine.generate(ids(*[1] * 15), clipped)[0]
        assert refused.error is not None
        assert "the prompt has 15 tokens and the KV pool holds 15 tokens" in refused.error
        output = engine.generate(ids(*range(12)), clipped)[0]
        assert output.token_ids == fake_tokens(list(range(12)), 3, vocab_size(engine))
