"""What a request keeps that loses its seat: all its KV (pause), a copy of it in host memory (offload), or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import fake_config, fake_tokens, real_config, require_idle, vocab_size
from step_cases import Steps, takes

from pluglm import Engine, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
BLOCK = 4
LAYERS = 2  # of the tiny model
BLOCK_BYTES = 2 * LAYERS * BLOCK * 8  # the fake store has one int64 as key and one as value


def make(model: Path, folder: Path, mode: str, blocks: int = 40, kv: str = "paged", **engine: Any) -> Engine:
    limits = {"max_num_seqs": 1, **engine}
    pool = {"use": kv, "block_size": BLOCK, "num_blocks": blocks}
    return Engine.from_config(fake_config(model, folder, scheduler=takes(folder, mode), kv=pool, engine=limits))


def interrupted(engine: Engine, urgent: list[int], **options: Any) -> Steps:
    """Request `a` has run for five steps when `b` arrives and takes its seat."""
    steps = Steps(engine)
    steps.add("a", [1, 2, 3], LONG, **options)
    steps.step(5)
    steps.add("b", urgent, SHORT, priority=-1)
    return steps


def require_both(steps: Steps, urgent: list[int]) -> None:
    size = vocab_size(steps.engine)
    if (steps.tokens("a"), steps.tokens("b")) != (fake_tokens([1, 2, 3], 12, size), fake_tokens(urgent, 3, size)):
        raise AssertionError("the tokens are not those of the requests alone")


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
def test_pause_costs_the_seat_alone(tiny_model: Path, tmp_path: Path, kv: str) -> None:
    with make(tiny_model, tmp_path, "pause", kv=kv) as engine:
        steps = interrupted(engine, [7, 8])
        table = steps.table("a")
        steps.step()
        assert (steps.running, steps.waiting) == (["b"], ["a"])
        assert steps.table("a") == table
        steps.until(lambda: steps.running == ["a"])
        assert steps.sequence("a").num_computed == len(steps.sequence("a").token_ids) - 1  # one token was computed
        assert steps.table("a")[: len(table)] == table
        steps.finish()
        require_both(steps, [7, 8])
        assert (steps.metrics("a").num_preemptions, steps.metrics("a").num_recomputed_tokens) == (1, 0)
        assert steps.metrics("a").num_cached_tokens == 0
        require_idle(engine)


def test_pause_gives_no_room_so_for_kv_it_is_a_recompute(tiny_model: Path, tmp_path: Path) -> None:
    """`b` has a seat of its own; `a` holds two of the three blocks, of which `b` needs two."""
    with make(tiny_model, tmp_path, "pause", blocks=4, max_num_seqs=2) as engine:
        steps = interrupted(engine, [7] * 9)
        computed = steps.sequence("a").num_computed
        steps.step()
        assert (steps.running, steps.waiting) == (["b"], ["a"])
        assert not steps.sequence("a").holds_kv
        steps.finish()
        require_both(steps, [7] * 9)
        assert steps.metrics("a").num_recomputed_tokens == computed
        require_idle(engine)


def test_a_paused_request_loses_its_kv_when_nothing_else_can_run(tiny_model: Path, tmp_path: Path) -> None:
    """The one seat is free and the urgent request finds no KV beside what the paused one keeps."""
    with make(tiny_model, tmp_path, "pause", blocks=4) as engine:
        steps = interrupted(engine, [7] * 9)
        computed = steps.sequence("a").num_computed
        steps.until(lambda: steps.running == ["b"], limit=3)
        assert not steps.sequence("a").holds_kv
        steps.finish()
        require_both(steps, [7] * 9)
        assert steps.metrics("a").num_recomputed_tokens == computed
        require_idle(engine)


def test_a_paused_request_keeps_its_kv_while_others_run(tiny_model: Path, tmp_path: Path) -> None:
    """`c` is next in order and does not fit; it waits for `b` instead of taking what `a` keeps."""
    with make(tiny_model, tmp_path, "pause", blocks=6, max_num_seqs=2) as engine:
        steps = Steps(engine)
        for name in ("a", "b"):
            steps.add(name, [1, 2, 3], LONG)
        steps.step(5)
        steps.add("u", [4], LONG, priority=-2)
        steps.step()
        assert sorted(steps.running) == ["a", "u"]
        steps.add("c", [7] * 9, SHORT, priority=-1)
        steps.step(2)
        assert steps.sequence("b").holds_kv
        assert steps.sequence("b").num_recomputed == 0
        steps.finish()
        for name in ("a", "b"):
            assert steps.tokens(name) == fake_tokens([1, 2, 3], 12, vocab_size(engine))
        assert steps.tokens("c") == fake_tokens([7] * 9, 3, vocab_size(engine))
        require_idle(engine)


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix", "contiguous"])
def test_offload_gives_up_the_blocks_and_computes_nothing_twice(tiny_model: Path, tmp_path: Path, kv: str) -> None:
    pool = {"use": kv, "block_size": BLOCK, "num_blocks": 4} if kv != "contiguous" else {"use": kv, "num_regions": 1}
    config = fake_config(
        tiny_model, tmp_path, scheduler=takes(tmp_path, "offload"), kv=pool, engine={"max_num_seqs": 1}
    )
    with Engine.from_config(config) as engine:
        steps = interrupted(engine, [7] * 9)
        steps.step()
        assert (steps.running, steps.waiting) == (["b"], ["a"])
        assert not steps.sequence("a").holds_kv
        assert steps.sequence("a").num_computed == 7
        steps.finish()
        require_both(steps, [7] * 9)
        assert (steps.metrics("a").num_preemptions, steps.metrics("a").num_recomputed_tokens) == (1, 0)
        require_idle(engine)


def test_what_comes_back_from_the_host_has_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    """Keys and values of every layer, in the model's own numbers, though other blocks may hold them."""
    pool = {"use": "paged", "block_size": BLOCK, "num_blocks": 6}
    config = real_config(
        tiny_model, tmp_path, scheduler=takes(tmp_path, "offload"), kv=pool, engine={"max_num_seqs": 1}
    )
    with Engine.from_config(config) as engine:
        steps = interrupted(engine, [7] * 17)
        store = steps.core.parts.runner.store

        def stored() -> torch.Tensor:
            """Keys and values of the seven tokens that `a` has computed, in every layer."""
            slots = [steps.table("a")[p // BLOCK] * BLOCK + p % BLOCK for p in range(7)]
            return torch.stack([of(layer)[slots] for layer in range(LAYERS) for of in (store.keys, store.values)])

        before, table = stored(), steps.table("a")
        assert steps.sequence("a").num_computed == 7
        steps.step()
        assert steps.running == ["b"]
        assert set(table) & set(steps.table("b"))  # what it had is overwritten
        steps.until(lambda: steps.running == ["a"])
        assert torch.equal(stored(), before)
        steps.finish()
        assert steps.metrics("a").num_recomputed_tokens == 0
        require_idle(engine)


@pytest.mark.parametrize(("num_bytes", "num_recomputed"), [(0, 7), (2 * BLOCK_BYTES - 1, 7), (2 * BLOCK_BYTES, 0)])
def test_without_host_memory_an_offload_is_a_recompute(
    tiny_model: Path, tmp_path: Path, num_bytes: int, num_recomputed: int
) -> None:
    """Seven computed tokens are two blocks."""
    with make(tiny_model, tmp_path, "offload", offload_memory=num_bytes) as engine:
        steps = interrupted(engine, [7, 8])
        steps.finish()
        require_both(steps, [7, 8])
        assert steps.metrics("a").num_recomputed_tokens == num_recomputed
        require_idle(engine)


@pytest.mark.parametrize(("how", "reason"), [("restore", "length"), ("cancel", "cancelled"), ("wait", "deadline")])
def test_host_memory_is_given_back_however_it_ends(tiny_model: Path, tmp_path: Path, how: str, reason: str) -> None:
    """There is room for one offloaded request; the second round would recompute if the first one kept it."""
    with make(tiny_model, tmp_path, "offload", offload_memory=2 * BLOCK_BYTES) as engine:
        for _ in range(3):
            steps = interrupted(engine, [7, 8], deadline_s=0.055 if how == "wait" else None)
            steps.step()
            assert steps.sequence("a").offloaded is not None
            if how == "cancel":
                steps.core.cancel("a")
            steps.finish()
            assert steps.end("a").finish_reason == reason
            assert steps.metrics("a").num_recomputed_tokens == 0
            require_idle(engine)


def test_only_what_was_computed_goes_to_the_host(tiny_model: Path, tmp_path: Path) -> None:
    """A prompt of ten blocks holds all of them from its first chunk on; two of them have been written by then."""
    with make(tiny_model, tmp_path, "offload", offload_memory=2 * BLOCK_BYTES, max_step_tokens=8) as engine:
        steps = Steps(engine)
        prompt = list(range(40))
        steps.add("a", prompt, SHORT)
        steps.step()
        assert (steps.held, steps.sequence("a").num_computed) == (10, 8)
        steps.add("b", [7, 8], SHORT, priority=-1)
        steps.finish()
        assert steps.metrics("a").num_recomputed_tokens == 0
        assert steps.tokens("a") == fake_tokens(prompt, 3, vocab_size(engine))
        require_idle(engine)
