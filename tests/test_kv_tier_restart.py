"""What one run left on disk serves the next one of the same model, and nobody else; damage is a miss."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ids, real_config, require_idle
from kv_file_cases import answer, num_cached
from kv_tier_cases import PROMPTS, disk, tiered

from pluglm import Engine, RunConfig

WHOLE = 36  # tokens of a prompt of 40 in whole blocks before its last token
RUN = """
import json, sys
from pluglm import Engine, SamplingParams
config, prompts = json.loads(sys.argv[1])
with Engine.from_config(config) as engine:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print(json.dumps([engine.generate(prompt, params)[0].token_ids for prompt in prompts]))
"""


def run_elsewhere(config: RunConfig) -> list[list[int]]:
    """All prompts, one after the other, in a process of its own."""
    arguments = json.dumps([config.model_dump(mode="json", exclude_unset=True), PROMPTS])
    done = subprocess.run([sys.executable, "-c", RUN, arguments], check=True, capture_output=True, text=True)
    tokens: list[list[int]] = json.loads(done.stdout)
    return tokens


def first_answer(config: RunConfig) -> tuple[list[int], int]:
    """Tokens of the first prompt, and how many of its own were adopted, in a new engine."""
    with Engine(config) as engine:
        output = answer(engine, PROMPTS[0])
        require_idle(engine)
    return output.token_ids, num_cached(output)


@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
def test_the_next_process_finds_it(tiny_model: Path, tmp_path: Path, use: str) -> None:
    """On the reference backend. Its first prompt is loaded whole: nothing that it measured speaks against it."""
    with Engine(real_config(tiny_model)) as plain:
        expected = [answer(plain, prompt).token_ids for prompt in PROMPTS]
    config = tiered(tiny_model, disk(tmp_path), use=use, make=real_config)
    assert run_elsewhere(config) == expected
    assert first_answer(config) == (expected[0], WHOLE)


def test_any_damaged_entry_is_recomputed(tiny_model: Path, tmp_path: Path) -> None:
    """Of many states of the folder after a crash or worse."""
    folder, kept, generator = tmp_path / "tier", tmp_path / "kept", random.Random(0)
    config = tiered(tiny_model, disk(folder))
    with Engine(config) as engine:
        expected = answer(engine, PROMPTS[0]).token_ids
        answer(engine, PROMPTS[1])
    shutil.copytree(folder, kept)
    misses = 0
    for _ in range(40):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        for file in generator.sample(sorted(folder.iterdir()), 3):
            data = bytearray(file.read_bytes())
            place = generator.randrange(len(data))
            match generator.randrange(4):
                case 0:
                    file.write_bytes(data[:place])
                case 1:
                    data[place] ^= generator.randrange(1, 256)
                    file.write_bytes(data)
                case 2:
                    file.unlink()
                case _:
                    file.write_bytes(generator.choice(sorted(folder.iterdir())).read_bytes())
        token_ids, num_adopted = first_answer(config)
        assert token_ids == expected
        misses += num_adopted < WHOLE
    assert misses > 20


def test_other_runs_find_nothing(make_tiny_model: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    """Not with other weights, another type, or blocks of another size; the same files elsewhere are the same model."""
    folder = tmp_path / "tier"
    with Engine(tiered(tiny_model, disk(folder))) as engine:
        for prompt in PROMPTS:
            answer(engine, prompt)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy, copy_function=shutil.copyfile)
    others: list[tuple[Path, dict[str, Any], int]] = [
        (make_tiny_model("other", seed=1), {}, 0),
        (tiny_model, {"attention": "naive"}, 0),
        (tiny_model, {"kv": {"num_blocks": 10, "block_size": 6}}, 0),
        (copy, {}, WHOLE),
    ]
    for model, changes, expected in others:
        with Engine(tiered(model, disk(folder), **changes)) as engine:
            assert num_cached(answer(engine, PROMPTS[0])) == expected, changes
            assert num_cached(answer(engine, ids(*range(5, 40)), salt="other")) == 0
