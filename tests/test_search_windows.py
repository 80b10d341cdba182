"""Lanes of a search fork KV of layers with a window, and find the outputs of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from beam_cases import beam_params, expected_beams, found_beams
from differential_cases import FORCED, FORCED_SOURCE
from engine_cases import real_config, require_idle, write_plugin
from window_cases import KINDS, WINDOW, prompts, write_model

from pluglm import Engine

LENGTHS = (2 * WINDOW + 16, WINDOW - 3)
WIDTH, MAX_TOKENS = 5, 12


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_model(tmp_path_factory.mktemp(family), family, tiny_model) for family in KINDS}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Callable[[str], list[list[list[int]]]]:
    known: dict[str, list[list[list[int]]]] = {}

    def outputs(family: str) -> list[list[list[int]]]:
        if family not in known:
            lists = [prompt["prompt_token_ids"] for prompt in prompts(LENGTHS)]
            known[family] = [expected_beams(models[family], one, WIDTH, MAX_TOKENS) for one in lists]
        return known[family]

    return outputs


@pytest.mark.parametrize(
    "slots",
    [
        {"kv": {"use": "window_paged", "block_size": 8}},
        {"kv": {"use": "window_paged", "block_size": 1}, "engine": {"max_step_tokens": 7, "max_num_seqs": 3}},
        {"kv": {"use": "window_paged", "block_size": 4}, "scheduler": f"{FORCED}:ForcedPreemption"},
        {"kv": "paged"},
    ],
    ids=["roomy", "chunked", "preempted", "paged"],
)
@pytest.mark.parametrize("family", KINDS)
def test_windows(models: dict[str, Path], tmp_path: Path, expected: Any, family: str, slots: dict[str, Any]) -> None:
    write_plugin(tmp_path, FORCED_SOURCE, FORCED)
    limits = {"model": {"path": str(models[family]), "dtype": "float32", "max_model_len": 160}}
    with Engine.from_config(real_config(models[family], tmp_path, search="beam", **limits, **slots)) as engine:
        outputs = engine.generate(prompts(LENGTHS), beam_params(WIDTH, WIDTH, MAX_TOKENS))
        require_idle(engine)
    assert [found_beams(one) for one in outputs] == expected(family)
