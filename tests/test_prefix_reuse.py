"""Prefix reuse through the engine: what is found, what never is, and what the metrics and callers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size, write_plugin
from step_cases import Steps

from pluglm import Engine, RequestOutput

BLOCK = 4
CACHES = pytest.mark.parametrize("kv", ["hash_prefix", "radix"])


def make(model: Path, kv: str, blocks: int | None = None, **slots: Any) -> Engine:
    return Engine.from_config(fake_config(model, kv={"use": kv, "block_size": BLOCK, "num_blocks": blocks}, **slots))


def ask(engine: Engine, prompt: list[int], **options: Any) -> RequestOutput:
    """One request alone; its tokens must be those of a run without a cache."""
    name = engine.submit(ids(*prompt), GREEDY, **options)
    output = RequestOutput(name, list(prompt))
    for event in engine.events(name):
        output.add(event)
    if output.token_ids != fake_tokens(prompt, 8, vocab_size(engine)):
        raise AssertionError(f"{prompt} gave {output.token_ids}: {output.error}")
    return output


def num_cached(output: RequestOutput) -> int:
    if output.metrics is None:
        raise AssertionError(output.error)
    return output.metrics.num_cached_tokens


def adoptable(kv: str, num_tokens: int) -> int:
    """Of a known prefix: whole blocks by hash, any number by the tree."""
    return num_tokens if kv == "radix" else num_tokens // BLOCK * BLOCK


@CACHES
def test_the_same_prompt_is_found_but_for_its_last_token(tiny_model: Path, kv: str) -> None:
    """That one is computed again, since its logits are needed."""
    prompt = list(range(1, 15))
    with make(tiny_model, kv) as engine:
        assert num_cached(ask(engine, prompt)) == 0
        for _ in range(2):
            output = ask(engine, prompt)
            assert num_cached(output) == adoptable(kv, len(prompt) - 1)
            assert output.metrics is not None
            assert output.metrics.num_recomputed_tokens == 0
        require_idle(engine)


@CACHES
def test_a_turn_finds_prompt_and_output_of_the_turns_before(tiny_model: Path, kv: str) -> None:
    """The last output token of a turn was drawn and never computed."""
    with make(tiny_model, kv) as engine:
        known: list[int] = []
        for turn in range(4):
            known += [100 + turn] * 5
            output = ask(engine, known)
            assert num_cached(output) == adoptable(kv, max(0, len(known) - 5 - 1))
            known += output.token_ids


@CACHES
def test_what_runs_is_found_by_what_arrives(tiny_model: Path, kv: str) -> None:
    """Whole blocks are offered as they are computed, not when their request ends."""
    prompt = list(range(1, 14))
    with make(tiny_model, kv) as engine:
        steps = Steps(engine)
        steps.add("first", prompt, GREEDY)
        steps.step()
        steps.add("second", [*prompt, 99], GREEDY)
        steps.step()
        assert steps.sequence("second").num_cached == 12
        assert steps.table("first")[:3] == steps.table("second")[:3]
        steps.finish()
        assert steps.tokens("second") == fake_tokens([*prompt, 99], 8, vocab_size(engine))


@CACHES
def test_what_a_cancelled_request_computed_is_found(tiny_model: Path, kv: str) -> None:
    prompt = list(range(1, 14))
    with make(tiny_model, kv) as engine:
        steps = Steps(engine)
        steps.add("gone", prompt, GREEDY)
        steps.step()
        steps.core.cancel("gone")
        steps.finish()
        assert num_cached(ask(engine, prompt)) == 12


@CACHES
def test_salts_keep_requests_apart(tiny_model: Path, kv: str) -> None:
    """Only the same salt shares; no salt is one of them."""
    prompt = list(range(1, 14))
    with make(tiny_model, kv) as engine:
        for salt in ("", "a", "b"):
            assert num_cached(ask(engine, prompt, salt=salt)) == 0
        for salt in ("", "a", "b"):
            assert num_cached(ask(engine, prompt, salt=salt)) == 12


@CACHES
def test_salts_come_through_every_way_of_asking(tiny_model: Path, kv: str) -> None:
    prompt = ids(*range(1, 14))

    async def last_chunk(engine: Engine) -> Any:
        return [chunk async for chunk in engine.astream(prompt, GREEDY, salt="a")][-1]

    with make(tiny_model, kv) as engine:
        engine.generate(prompt, GREEDY)
        streamed = list(engine.stream(prompt, GREEDY, salt="a"))[-1]
        assert streamed.metrics is not None
        assert streamed.metrics.num_cached_tokens == 0
        assert asyncio.run(last_chunk(engine)).metrics.num_cached_tokens == 12
        assert num_cached(engine.generate(prompt, GREEDY)[0]) == 12


@CACHES
def test_reset_forgets_all_and_disturbs_nobody(tiny_model: Path, kv: str) -> None:
    """Also what runs now is not found later: it may have begun with what was to be forgotten."""
    prompt, other = list(range(1, 14)), list(range(50, 63))
    with make(tiny_model, kv) as engine:
        ask(engine, prompt)
        steps = Steps(engine)
        steps.add("runs", other, GREEDY)
        steps.step(2)
        engine.reset_prefix_cache()
        assert engine._core.kv.capacity().cached_blocks == 0
        steps.finish()
        assert steps.tokens("runs") == fake_tokens(other, 8, vocab_size(engine))
        assert engine._core.kv.capacity().cached_blocks == 0
        for one in (prompt, other):
            assert num_cached(ask(engine, one)) == 0
            assert num_cached(ask(engine, one)) == 12
        require_idle(engine)


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
def test_without_a_cache_reset_does_nothing_and_nothing_is_found(tiny_model: Path, kv: str) -> None:
    with Engine.from_config(fake_config(tiny_model, kv=kv)) as engine:
        for _ in range(2):
            assert num_cached(ask(engine, list(range(1, 14)))) == 0
            engine.reset_prefix_cache()


@CACHES
def test_a_preempted_request_finds_what_it_had_computed(tiny_model: Path, kv: str) -> None:
    """Two requests outgrow seven blocks; what the second loses stays cached as far as the first leaves room."""
    prompts = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10]}
    recomputed: dict[str, int] = {}
    for manager in ("paged", kv):
        with make(tiny_model, manager, blocks=7) as engine:
            steps = Steps(engine)
            for name, prompt in prompts.items():
                steps.add(name, prompt, GREEDY.model_copy(update={"max_tokens": 12}))
            steps.finish()
            for name, prompt in prompts.items():
                assert steps.tokens(name) == fake_tokens(prompt, 12, vocab_size(engine))
            assert steps.metrics("b").num_preemptions > 0
            assert steps.metrics("b").num_cached_tokens == 0  # nothing was there when it first came
            recomputed[manager] = steps.metrics("b").num_recomputed_tokens
            require_idle(engine)
    assert recomputed[kv] < recomputed["paged"]


@CACHES
def test_a_small_pool_serves_more_prefixes_than_it_can_keep(tiny_model: Path, kv: str) -> None:
    """Forty prompts go round in a pool that caches the blocks of three or four."""
    with make(tiny_model, kv, blocks=16) as engine:
        for turn in range(80):
            number = turn % 40
            ask(engine, [number // 20, number // 5, *range(number, number + 9)])
            engine._core.kv.audit()
            capacity = engine._core.kv.capacity()
            assert capacity.free_blocks + capacity.cached_blocks == 16
        require_idle(engine)


@CACHES
def test_where_keys_depend_on_the_prompts_length_only_equal_lengths_share(
    make_tiny_model: Callable[..., Path], kv: str
) -> None:
    """Dynamic rope scaling stretches the positions of a prompt beyond the first 16 by its length."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = make_tiny_model(f"dynamic_{kv}", max_position_embeddings=16, rope_scaling=scaling)
    start = [9, 41, 77, 12, 30, 5, 18, 33, 21, 8, 99, 3, 4, 6, 7, 11, 13, 15, 16, 17]
    prompts = [[*start, 100], [*start, 100, 101], [*start, 102], [*start, 100, 103]]
    with Engine.from_config(real_config(model, kv={"use": "paged", "block_size": BLOCK})) as engine:
        expected = [engine.generate(ids(*prompt), GREEDY)[0].token_ids for prompt in prompts]
    with Engine.from_config(real_config(model, kv={"use": kv, "block_size": BLOCK})) as engine:
        outputs = [engine.generate(ids(*prompt), GREEDY)[0] for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected
    assert [num_cached(output) for output in outputs] == [0, 0, 20, 20 if kv == "hash_prefix" else 21]


@CACHES
def test_where_they_do_not_all_lengths_share(tiny_model: Path, kv: str) -> None:
    """The same prompts as above on plain rope."""
    start = list(range(30, 50))
    with Engine.from_config(real_config(tiny_model, kv={"use": kv, "block_size": BLOCK})) as engine:
        outputs = [engine.generate(ids(*start, *rest), GREEDY)[0] for rest in ([100], [100, 101])]
    assert [num_cached(output) for output in outputs] == [0, 20 if kv == "hash_prefix" else 21]


@CACHES
@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_a_stop_inside_accepted_drafts_is_a_stop(tiny_model: Path, tmp_path: Path, kv: str, position: int) -> None:
    """KV of the drafts behind it was computed already; only that of the text is offered to others."""
    source = """
        from engine_cases import fake_tokens
        from pluglm.kernel.interfaces.component import ComponentConfig
        from pluglm.kernel.interfaces.drafter import Drafter, Proposal

        class Right(Drafter):
            Config = ComponentConfig
            interface_version = 2

            def __init__(self, config, context):
                pass

            def propose(self, requests):
                return [Proposal(fake_tokens(one.token_ids, min(3, one.max_tokens), 320)) for one in requests]

            def observe(self, sequence_id, num_accepted, token_ids):
                pass

            def release(self, sequence_id):
                pass
    """
    write_plugin(tmp_path, source, "right")
    pool = {"use": kv, "block_size": BLOCK}
    with Engine.from_config(fake_config(tiny_model, tmp_path, kv=pool, drafter="right:Right")) as engine:
        expected = fake_tokens([1, 2, 3], position + 1, vocab_size(engine))
        params = GREEDY.model_copy(update={"stop_token_ids": (expected[-1],)})
        output = engine.generate(ids(1, 2, 3), params)[0]
        assert (output.token_ids, output.finish_reason, output.error) == (expected, "stop", None)
        known = [1, 2, 3, *expected]
        turn = engine.generate(ids(*known, 9), GREEDY)[0]
        assert turn.token_ids == fake_tokens([*known, 9], 8, vocab_size(engine))
        assert adoptable(kv, len(known) - 1) <= num_cached(turn) <= adoptable(kv, len(known))
        require_idle(engine)
