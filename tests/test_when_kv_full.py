"""engine.when_kv_full: what gives when a running request finds no free block, and who is told what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, fake_tokens, ids, require_idle, vocab_size
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import IncompatibleError, RequestError

BLOCK = 4
POOL = 5  # blocks; two requests of PARAMS want four each
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
OLD, LAST = [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20, 21]


def make(model: Path, when: str, kv: str = "paged", blocks: int = POOL, **slots: Any) -> Engine:
    engine = {"when_kv_full": when, **slots.pop("engine", {})}
    pool = {"use": kv, "block_size": BLOCK, "num_blocks": blocks}
    return Engine.from_config(fake_config(model, kv=pool, engine=engine, **slots))


def started(engine: Engine) -> Steps:
    steps = Steps(engine)
    for name, prompt in PROMPTS.items():
        steps.add(name, prompt, PARAMS)
    return steps


def require_tokens(steps: Steps, name: str, count: int = 12) -> None:
    expected = fake_tokens(PROMPTS[name], count, vocab_size(steps.engine))
    if steps.tokens(name) != expected:
        raise AssertionError(f"{name} has {steps.tokens(name)}, not {expected}")


@pytest.mark.parametrize("when", ["shrink", "preempt"])
def test_the_later_request_steps_back_and_both_finish(tiny_model: Path, when: str) -> None:
    with make(tiny_model, when) as engine:
        steps = started(engine)
        steps.finish()
        for name in PROMPTS:
            assert steps.end(name).finish_reason == "length"
            require_tokens(steps, name)
        assert steps.metrics("a").num_preemptions == 0
        assert steps.metrics("b").num_preemptions > 0
        require_idle(engine)


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
@pytest.mark.parametrize(("when", "num_victims"), [("shrink", 0), ("preempt", 1)])
def test_whether_the_cache_or_a_request_goes_first(tiny_model: Path, kv: str, when: str, num_victims: int) -> None:
    """Three requests hold all but the two idle blocks when the first of them, a step ahead, needs a third block.

    A victim's blocks are cached as well, so one victim is enough, and the cache is no smaller for it.
    """
    with make(tiny_model, when, kv, blocks=8) as engine:
        engine.generate(ids(*OLD[:8]), PARAMS.model_copy(update={"max_tokens": 1}))
        steps = Steps(engine)
        for name, prompt in (("a", PROMPTS["a"]), ("b", [5, 6, 7]), ("c", LAST)):
            steps.add(name, prompt, PARAMS)
        steps.step(5)
        before = steps.core.kv.capacity()
        assert (before.free_blocks, before.held_blocks, before.cached_blocks) == (0, 6, 2)
        steps.step()
        assert len(steps.tokens("a")) == 6
        assert steps.waiting == ["c"] * num_victims
        assert (steps.core.kv.capacity().cached_blocks < 2) == (num_victims == 0)
        steps.finish()
        assert steps.tokens("c") == fake_tokens(LAST, 12, vocab_size(engine))
        require_idle(engine)


@pytest.mark.parametrize("when", ["preempt", "refuse", "exit"])
def test_idle_cached_blocks_go_before_a_request_that_is_alone(tiny_model: Path, when: str) -> None:
    with make(tiny_model, when, "hash_prefix", blocks=4) as engine:
        engine.generate(ids(*OLD), PARAMS.model_copy(update={"max_tokens": 1}))
        assert engine._core.kv.capacity().cached_blocks > 0
        output = engine.generate(ids(*PROMPTS["a"]), PARAMS)[0]
        assert output.token_ids == fake_tokens(PROMPTS["a"], 12, vocab_size(engine))
        require_idle(engine)


def test_refuse_ends_the_one_that_found_nothing(tiny_model: Path) -> None:
    with make(tiny_model, "refuse", engine={"max_num_seqs": 2}) as engine:
        steps = started(engine)
        steps.add("waits", [3], PARAMS.model_copy(update={"max_tokens": 3}))
        steps.finish()
        assert steps.end("a").finish_reason == "length"
        require_tokens(steps, "a")
        end = steps.end("b")
        assert end.finish_reason == "refused"
        assert end.error is not None
        require_tokens(steps, "b", len(steps.tokens("b")))  # what it has so far is kept
        assert len(steps.tokens("b")) == BLOCK + 1
        assert f"the KV pool is full: its token {2 * BLOCK + 1} finds no free block while" in end.error
        assert "raise engine.kv_memory or the sizes set in kv, lower engine.max_num_seqs" in end.error
        assert "\n" not in end.error
        assert steps.end("waits").finish_reason == "length"
        assert {steps.metrics(name).num_preemptions for name in ("a", "b", "waits")} == {0}
        require_idle(engine)


def test_refuse_ends_all_outputs_of_a_request(tiny_model: Path) -> None:
    with make(tiny_model, "refuse") as engine:
        output = engine.generate(ids(*PROMPTS["a"]), PARAMS.model_copy(update={"n": 3}))[0]
        assert output.finish_reason == "refused"
        assert {one.finish_reason for one in output.completions} == {"refused"}
        assert output.error is not None
        require_idle(engine)


def test_exit_ends_everything_and_nothing_more_is_taken(tiny_model: Path) -> None:
    with make(tiny_model, "exit") as engine:
        steps = started(engine)
        steps.add("waits", [3], PARAMS)
        steps.finish()
        for name in ("a", "b", "waits"):
            end = steps.end(name)
            assert end.finish_reason == "error"
            assert end.error is not None
            assert "the KV pool is full" in end.error
        require_idle(engine)
        with pytest.raises(RequestError, match=r"request 'more': the engine has stopped: the KV pool is full"):
            engine.submit(ids(1), PARAMS, request_id="more")
        output = engine.generate(ids(1), PARAMS)[0]
        assert output.finish_reason == "refused"
        engine.step()
        require_idle(engine)


@pytest.mark.parametrize("when", ["preempt", "refuse", "exit"])
def test_a_whole_scheduler_takes_no_such_key(tiny_model: Path, when: str) -> None:
    says = rf"scheduler 'static_batch'.* cannot run with engine.when_kv_full: {when}: it plans alone; leave the key out"
    with pytest.raises(IncompatibleError, match=says):
        make(tiny_model, when, scheduler="static_batch")
    with make(tiny_model, "shrink", scheduler="static_batch") as engine:
        assert engine.generate(ids(1), PARAMS)[0].finish_reason == "length"
