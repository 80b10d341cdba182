"""Public reports about reused KV: wrong hits, missed hits, stale and foreign blocks. Each docstring names the report.

Without a counterpart here: images in prompts (vllm #20261, LMCache #4086), adapters, and log-probabilities of prompt
tokens; where the same mistake could be made with what there is, that is tested.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.cache_keys import namespace
from pluglm.kernel.core import CacheKey

MANAGERS = ("contiguous", "paged", "hash_prefix", "radix")
CACHES = pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def make(model: Path, kv: str, blocks: int | None = None, block_size: int = 4, **slots: Any) -> Engine:
    sizes = {} if kv == "contiguous" else {"block_size": block_size, "num_blocks": blocks}
    return Engine.from_config(fake_config(model, kv={"use": kv, **sizes}, **slots))


@CACHES
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_whole_hit_leaves_a_token_to_compute_at_every_length(tiny_model: Path, kv: str, block_size: int) -> None:
    """vllm #30320, vllm #53706, vllm PR #11186: a prompt that was cached whole left nothing to compute."""
    with make(tiny_model, kv, block_size=block_size) as engine:
        for length in range(1, 3 * block_size + 3):
            prompt = [length % 300] * length  # no other length shares its first token
            for turn in range(2):
                output = engine.generate(ids(*prompt), ONE)[0]
                assert output.token_ids == fake_tokens(prompt, 1, vocab_size(engine))
                assert output.metrics is not None
                unit = block_size if kv == "hash_prefix" else 1  # the tree matches token by token
                assert output.metrics.num_cached_tokens == (turn and (length - 1) // unit * unit)
        require_idle(engine)


@CACHES
@pytest.mark.parametrize("length", [4, 15, 16, 17, 33])
def test_a_replay_over_its_own_kv_has_the_same_numbers(tiny_model: Path, kv: str, length: int) -> None:
    """lablup/mlxcel #1760: the last token was computed again onto KV that had it already, and greedy replays differed.

    Log-probabilities of the first token, over the whole vocabulary, are compared bit for bit.
    """
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=100)
    prompt = ids(*range(40, 40 + length))
    with Engine.from_config(real_config(tiny_model, kv={"use": "paged", "block_size": 4})) as engine:
        expected = engine.generate(prompt, params)[0]
    with Engine.from_config(real_config(tiny_model, kv={"use": kv, "block_size": 4})) as engine:
        for turn in range(3):
            output = engine.generate(prompt, params)[0]
            assert output.token_ids == expected.token_ids
            assert output.logprobs == expected.logprobs
            assert output.metrics is not None
            assert (output.metrics.num_cached_tokens > 0) == (turn > 0 and (length > 4 or kv == "radix"))


Fields = st.dictionaries(st.sampled_from(["a", "b", "ab", "salt"]), st.integers(0, 3) | st.text("ab1", max_size=3))


@given(first=Fields, second=Fields)
def test_no_field_passes_for_another(first: dict[str, Any], second: dict[str, Any]) -> None:
    """vllm #44701: adapter names and salts were put into one key space, and a plain request found an adapter's KV."""
    assert (namespace(first) == namespace(second)) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "1"}, {"salt": 1}),
        ({"salt": b"1"}, {"salt": "1"}),
        ({"salt": "ab"}, {"salt": "a", "b": ""}),
        ({"salt": "x"}, {"num_prompt": "x"}),
        ({"salt": ""}, {}),
    ],
    ids=str,
)
def test_types_names_and_lengths_are_part_of_a_field(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The same report."""
    assert namespace(first) != namespace(second)


@CACHES
def test_a_salt_finds_nothing_that_is_not_its_own_whatever_it_looks_like(tiny_model: Path, kv: str) -> None:
    """The same report, through the engine: the salts are what other fields of the key contain."""
    with make(tiny_model, kv) as engine:
        run: Any = engine._core.parts.namespace
        for salt in ("", "salt", "run", "9", run.hex(), run.decode("latin-1"), "\x00"):
            events = list(engine.events(engine.submit(ids(*range(9)), GREEDY, salt=salt)))
            assert events[-1].metrics is not None
            assert events[-1].metrics.num_cached_tokens == 0


def test_a_checkpoint_of_the_same_name_and_other_weights_is_another_one(tiny_model: Path, tmp_path: Path) -> None:
    """vllm #30931: two adapters with one name shared KV. There are no adapters; a model's folder can be overwritten."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)

    def key(**slots: Any) -> bytes:
        with Engine.from_config(real_config(model, **slots)) as engine:
            return bytes(engine._core.parts.namespace)

    before = key()
    assert key() == before
    loose: dict[str, Any] = {"engine": {"deterministic": False}}
    others = [
        key(**loose),
        key(**loose, attention="sdpa"),
        key(**loose, model={"path": str(model), "dtype": "bfloat16"}),
    ]
    assert len({before, *others}) == 4
    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + torch.ones_like(weights[name])}, model / "model.safetensors")
    assert key() != before


@CACHES
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_log_probabilities_are_one_a_token_with_and_without_a_hit(
    tiny_model: Path, kv: str, drafter: str | None
) -> None:
    """vllm #3251, vllm #3914, vllm #8268: with a cached prefix there were crashes, or rows of other tokens.

    Those were of prompt tokens, which nobody can ask for here; the output's are at the same risk.
    """
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompt = ids(*[7, 8] * 9)
    with make(tiny_model, kv, drafter=drafter) as engine:
        first, second = (engine.generate(prompt, params)[0] for _ in range(2))
        assert second.metrics is not None
        assert second.metrics.num_cached_tokens > 0
        assert [one.token_id for one in second.logprobs] == second.token_ids
        assert second.logprobs == first.logprobs
        assert {len(one.top) for one in second.logprobs} == {3}


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_streams_do_not_diverge_under_churn(tiny_model: Path, kv: str, seed: int) -> None:
    """vllm #37076, vllm #39146, vllm #38606: up to ten of ten fuzzed runs diverged under eviction and cancellation."""
    draw = random.Random(seed)
    with make(tiny_model, kv, blocks=14, engine={"max_num_seqs": 4, "max_step_tokens": 9}) as engine:
        steps = Steps(engine)
        prompts: dict[str, list[int]] = {}
        for number in range(60):
            name = f"r{number}"
            prompts[name] = [draw.choice((1, 2))] * draw.randint(1, 9) + [draw.randrange(300)] * draw.randint(0, 5)
            params = GREEDY.model_copy(update={"n": draw.choice((1, 1, 3))})
            steps.add(name, prompts[name], params, salt=draw.choice(("", "", "s")))
            steps.step(draw.randint(0, 4))
            if draw.random() < 0.3:
                steps.core.cancel(f"r{draw.randint(0, number)}")
            if draw.random() < 0.1:
                steps.core.memory.reset_cache()
        steps.finish()
        for name, prompt in prompts.items():
            assert steps.end(name).finish_reason in ("length", "cancelled")
            for lane in range(3):
                tokens = steps.tokens(name, lane)
                assert tokens == fake_tokens(prompt, len(tokens), vocab_size(engine))
                if steps.lane_ends(name).get(lane) == "length":
                    assert len(tokens) == 8
        require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_second_release_is_an_error_and_frees_nothing_twice(tiny_model: Path, kv: str) -> None:
    """vllm #42571: a block that was listed twice counted as two free ones."""
    with make(tiny_model, kv, blocks=8) as engine:
        manager: Any = engine._core.kv
        idle = manager.capacity()
        transaction = manager.transaction()
        transaction.acquire(1)
        transaction.extend(1, 9)
        transaction.fork(1, 2)
        transaction.release(1)
        with pytest.raises(ValueError, match="KV sequence 1 holds no table"):
            transaction.release(1)
        transaction.release(2)
        transaction.commit()
        manager.audit()
        assert manager.capacity() == idle


@CACHES
def test_an_evicted_block_is_forgotten_when_it_is_used_again(tiny_model: Path, kv: str) -> None:
    """vllm PR #44237, kvcached #362: evicted blocks kept their old hash, so the map grew and then failed."""
    with make(tiny_model, kv, blocks=6) as engine:
        steps = Steps(engine)
        steps.add("first", [300] * 9, ONE)
        steps.step(0)
        key = CacheKey(steps.sequence("first").namespace, [300] * 9, 8)
        steps.finish()
        cache: Any = engine._core.parts.prefix_cache
        assert cache.probe(key) == 8
        for number in range(40):
            steps.add(f"r{number}", [number] * 17, ONE)
            steps.finish()
            capacity = engine._core.kv.capacity()
            assert capacity.cached_blocks <= capacity.total_blocks
        assert cache.probe(key) == 0
        steps.add("again", [300] * 9, GREEDY)
        steps.finish()
        assert steps.metrics("again").num_cached_tokens == 0
        assert steps.tokens("again") == fake_tokens([300] * 9, 8, vocab_size(engine))
        manager: Any = engine._core.parts.runner.kv
        assert len(manager._target._cache.entries) <= 6
