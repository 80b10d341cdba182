"""KV saved in one process gives the same answers in another; what does not belong is a miss that says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size, write_plugin
from kv_file_cases import PROMPT, answer, cached, num_cached, require_miss, resealed, saved

from pluglm import Engine
from pluglm.kernel.errors import CheckpointError, RequestError
from pluglm.kv.files import SavedKV

MANAGERS = ["hash_prefix", "radix"]
SAVER = """
import json, sys
from pluglm import Engine, SamplingParams
config, prompt, path = json.loads(sys.argv[1])
with Engine.from_config(config) as engine:
    engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    saved = engine.save_kv(prompt, path)
    print(json.dumps([saved.num_tokens, saved.num_bytes]))
"""


def save_elsewhere(config: Any, prompt: Any, path: Path) -> SavedKV:
    """In a process of its own."""
    arguments = json.dumps([config.model_dump(mode="json", exclude_unset=True), prompt, str(path)])
    done = subprocess.run([sys.executable, "-c", SAVER, arguments], check=True, capture_output=True, text=True)
    return SavedKV(*json.loads(done.stdout))


@pytest.mark.parametrize("saver", MANAGERS)
def test_another_process_gives_the_same_tokens_and_computes_less(tiny_model: Path, tmp_path: Path, saver: str) -> None:
    """On the reference backend, against a run that knows nothing of files or caches."""
    with Engine(real_config(tiny_model)) as plain:
        expected = answer(plain).token_ids
    path = tmp_path / "kv"
    stored = save_elsewhere(cached(tiny_model, saver, 4, real_config), PROMPT, path)
    assert stored == SavedKV({"hash_prefix": 20, "radix": 21}[saver], path.stat().st_size)
    for use in MANAGERS:
        for block_size in (1, 3, 16):
            with Engine(cached(tiny_model, use, block_size, real_config)) as engine:
                loaded = engine.load_kv(path)
                whole = stored.num_tokens if use == "radix" else stored.num_tokens // block_size * block_size
                assert (loaded.num_tokens, loaded.reason) == (whole, "")
                output = answer(engine)
                assert output.token_ids == expected
                usable = 20 if use == "radix" else 20 // block_size * block_size
                assert num_cached(output) == min(whole, usable), "all but the last token, which is always computed"
                require_idle(engine)


@pytest.mark.parametrize("use", MANAGERS)
def test_requests_that_go_on_differently_share_it(tiny_model: Path, tmp_path: Path, use: str) -> None:
    config, path = cached(tiny_model, use), tmp_path / "kv"
    saved(config, path)
    with Engine(config) as engine:
        engine.load_kv(path)
        for prompt in ([*range(40, 61), 7, 8], [*range(40, 52), 9, 9], [9, *range(40, 61)]):
            output = answer(engine, ids(*prompt))
            assert output.token_ids == fake_tokens(prompt, 8, vocab_size(engine))
            assert num_cached(output) == (0 if prompt[0] == 9 else 12 if prompt[12] == 9 else 20 + (use == "radix"))


@pytest.mark.parametrize("use", MANAGERS)
def test_saved_twice_and_loaded_twice(tiny_model: Path, tmp_path: Path, use: str) -> None:
    """Also over what is cached already, in part or in whole, and from an engine that has loaded it itself."""
    config, path, again = cached(tiny_model, use), tmp_path / "kv", tmp_path / "again"
    expected = saved(config, path)
    with Engine(config) as engine:
        answer(engine, ids(*range(40, 50)))
        first, second = engine.load_kv(path), engine.load_kv(path)
        assert first == second
        assert engine.save_kv(PROMPT, again).num_tokens == first.num_tokens
        assert answer(engine).token_ids == expected
        require_idle(engine)
    with Engine(config) as engine:
        assert engine.load_kv(again) == first
        assert answer(engine).token_ids == expected


def test_loading_disturbs_nobody(tiny_model: Path, tmp_path: Path) -> None:
    """Between any two steps of requests that run."""
    config, path = cached(tiny_model, engine={"max_step_tokens": 8}), tmp_path / "kv"
    saved(config, path)
    prompt = [*range(40, 52), *range(100, 120)]
    with Engine(config) as engine:
        request_id = engine.submit(ids(*prompt), GREEDY)
        tokens: list[int] = []
        for _ in range(40):
            engine.step()
            engine.load_kv(path)
            engine.reset_prefix_cache()
        for event in engine.events(request_id):
            tokens += event.token_ids
        assert tokens == fake_tokens(prompt, 8, vocab_size(engine))
        require_idle(engine)


@pytest.mark.parametrize("use", MANAGERS)
def test_a_pool_without_room_is_a_miss(tiny_model: Path, tmp_path: Path, use: str) -> None:
    path = tmp_path / "kv"
    saved(cached(tiny_model, use), path)
    with Engine(cached(tiny_model, use, kv={"num_blocks": 4})) as engine:
        before = engine._core.kv.capacity()
        require_miss(engine.load_kv(path), path, "no room")
        assert engine._core.kv.capacity() == before
        require_idle(engine)
    with Engine(cached(tiny_model, use, kv={"num_blocks": 7})) as engine:
        request_id = engine.submit(ids(*range(100, 112)), GREEDY)
        engine.step()
        require_miss(engine.load_kv(path), path, "no room")
        events = list(engine.events(request_id))
        assert sum((event.token_ids for event in events), ()) == tuple(
            fake_tokens(list(range(100, 112)), 8, vocab_size(engine))
        )
        assert engine.load_kv(path).num_tokens >= 20, "idle cached blocks make room"
        require_idle(engine)


def test_fewer_tokens_than_a_block_are_a_miss_where_only_blocks_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    saved(cached(tiny_model), path)
    with Engine(cached(tiny_model, block_size=32)) as engine:
        require_miss(engine.load_kv(path), path, "fill no block of 32 tokens")
        assert num_cached(answer(engine)) == 0


def test_salts_stay_apart(tiny_model: Path, tmp_path: Path) -> None:
    config, path, other = cached(tiny_model), tmp_path / "kv", tmp_path / "other"
    saved(config, path, salt="tenant of secret name")
    saved(config, other, salt="tenant of secret name")
    assert b"secret" not in path.read_bytes()
    assert path.read_bytes() != other.read_bytes(), "the digests of one salt have different keys"
    with Engine(config) as engine:
        for salt in ("", "tenant", "Tenant of secret name"):
            require_miss(engine.load_kv(path, salt=salt), path, "another salt")
        assert engine.load_kv(path, salt="tenant of secret name").num_tokens == 20
        assert num_cached(answer(engine)) == 0
        assert num_cached(answer(engine, salt="tenant of secret name")) == 20


def test_prompt_lengths_stay_apart_where_keys_depend_on_them(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_tiny_model(
        "dynamic", max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    )
    path, prompts = tmp_path / "kv", [ids(*range(40, end)) for end in (80, 81)]
    expected = [saved(cached(model, make=real_config), tmp_path / f"{one}", prompts[one]) for one in (1, 0)][::-1]
    (tmp_path / "0").rename(path)
    with Engine(cached(model, make=real_config)) as engine:
        assert engine.load_kv(path).num_tokens == 40
        outputs = [answer(engine, prompt) for prompt in prompts]
        assert [output.token_ids for output in outputs] == expected
        assert [num_cached(output) for output in outputs] == [36, 0]
        for wrong in (None, 39):
            resealed(path, lambda document, _, wrong=wrong: document.update(num_prompt=wrong))
            require_miss(engine.load_kv(path), path, "a prompt of")


RUNS: dict[str, dict[str, Any]] = {
    "dtype": {"model": {"dtype": "bfloat16"}, "engine": {"deterministic": False}},
    "attention": {"attention": "sdpa", "engine": {"deterministic": False}},
    "deterministic": {"engine": {"deterministic": False}},
    "quantizer": {"quantizer": "int8", "engine": {"deterministic": False}},
    "backend": {"backend": "fake"},
}


@pytest.mark.parametrize("field", RUNS)
def test_another_run_misses(tiny_model: Path, tmp_path: Path, field: str) -> None:
    path, base = tmp_path / "kv", {"engine": {"deterministic": field not in ("attention", "quantizer", "dtype")}}
    saved(cached(tiny_model, make=real_config, **base), path)
    changes = {**RUNS[field]}
    model = {"path": str(tiny_model), "dtype": "float32", **changes.pop("model", {})}
    with Engine(cached(tiny_model, make=real_config, **changes, model=model)) as engine:
        require_miss(engine.load_kv(path), path, f"another {field}")
        assert num_cached(answer(engine)) == 0


def test_another_model_misses(make_tiny_model: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    saved(cached(tiny_model), path)
    for model, field in (
        (make_tiny_model("other", seed=1), "weights"),
        (make_tiny_model("deeper", num_hidden_layers=3), "config"),
    ):
        with Engine(cached(model)) as engine:
            require_miss(engine.load_kv(path), path, f"another {field}")


def test_the_same_files_elsewhere_match(tiny_model: Path, tmp_path: Path) -> None:
    """Name of the folder and times of change say nothing; one changed weight does."""
    copy, path = tmp_path / "copy", tmp_path / "kv"
    shutil.copytree(tiny_model, copy, copy_function=shutil.copyfile)
    saved(cached(tiny_model), path)
    with Engine(cached(copy)) as engine:
        assert engine.load_kv(path).num_tokens == 20
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with Engine(cached(copy)) as engine:
        require_miss(engine.load_kv(path), path, "another weights")


def test_weights_that_change_under_a_running_engine(tiny_model: Path, tmp_path: Path) -> None:
    copy, path = tmp_path / "copy", tmp_path / "kv"
    shutil.copytree(tiny_model, copy)
    saved(cached(tiny_model), path)
    with Engine(cached(copy)) as engine:
        answer(engine)
        (copy / "model.safetensors").touch()
        with pytest.raises(CheckpointError, match="changed after they were loaded"):
            engine.save_kv(PROMPT, tmp_path / "new")
        require_miss(engine.load_kv(path), path, "changed after they were loaded")
    assert not (tmp_path / "new").exists()


def test_a_loose_component_counts_by_its_source(tiny_model: Path, tmp_path: Path) -> None:
    source = "from pluglm_attention.naive import NaiveAttention\nclass Mine(NaiveAttention):\n    pass\n"
    path = tmp_path / "kv"

    def config(name: str, text: str) -> Any:
        return fake_config(
            tiny_model,
            tmp_path,
            kv={"use": "radix", "block_size": 4},
            attention=f"{write_plugin(tmp_path, text, name)}:Mine",
        )

    saved(config("mine", source), path)
    with Engine(config("mine", source)) as engine:
        assert engine.load_kv(path).num_tokens == 21
    changed = config("mine", source + "    factor = 2\n")
    with Engine(changed) as engine:
        require_miss(engine.load_kv(path), path, "another attention")


def test_what_cannot_be_saved_says_why(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(fake_config(tiny_model)) as engine:
        for call in (lambda: engine.save_kv(PROMPT, tmp_path / "kv"), lambda: engine.load_kv(tmp_path / "kv")):
            with pytest.raises(RequestError, match=r"kv 'paged' keeps no KV that requests could share.*hash_prefix"):
                call()
    with Engine(cached(tiny_model)) as engine:
        with pytest.raises(RequestError, match="nothing of this prompt is cached"):
            engine.save_kv(PROMPT, tmp_path / "kv")
        answer(engine)
        with pytest.raises(RequestError, match="nothing of this prompt is cached"):
            engine.save_kv(PROMPT, tmp_path / "kv", salt="other")
        with pytest.raises(RequestError, match="cannot be written"):
            engine.save_kv(PROMPT, tmp_path)
        with pytest.raises(RequestError, match="token id -1, outside"):
            engine.save_kv(ids(-1), tmp_path / "kv")
        wrong: Any = 3
        with pytest.raises(RequestError, match="path must be a string or a Path, not int"):
            engine.load_kv(wrong)
        with pytest.raises(RequestError, match="salt must be a string, not int"):
            engine.save_kv(PROMPT, tmp_path / "kv", salt=wrong)
        require_idle(engine)
    assert list(tmp_path.iterdir()) == []


def test_a_manager_that_fails_is_a_miss(tiny_model: Path, tmp_path: Path) -> None:
    """Each call that loading makes of it, with everything given back afterwards."""
    path = tmp_path / "kv"
    source = """
        from pluglm_prefix_cache.hash_prefix import HashPrefixKV
        class Mine(HashPrefixKV):
            failing = False
            def publish(self, sequence_id, key):
                if self.failing:
                    raise OSError("no more")
                super().publish(sequence_id, key)
    """
    module = write_plugin(tmp_path, source, "failing_kv")
    config = fake_config(tiny_model, tmp_path, kv={"use": f"{module}:Mine", "block_size": 4})
    expected = saved(config, path)
    with Engine(config) as engine:
        manager: Any = engine._core.kv
        manager._target.failing = True
        require_miss(engine.load_kv(path), path, "failed")
        require_idle(engine)
        manager._target.failing = False
        assert engine.load_kv(path).num_tokens == 20
        assert answer(engine).token_ids == expected
        engine._core.parts.runner.store.copy_blocks = torch.stack  # type: ignore[method-assign]  # which fails
        engine.reset_prefix_cache()
        require_miss(engine.load_kv(path), path, "failed")
        require_idle(engine)
