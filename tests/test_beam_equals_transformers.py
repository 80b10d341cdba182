"""Beam search finds the outputs of transformers' `generate(num_beams=...)`, token for token, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_cases import beam_params, expected_beams, found_beams, peer_of
from engine_cases import ids, real_config, require_idle

from pluglm import Engine

FEW = {"vocab_size": 12}  # more ids than lanes, or transformers fills up with copies of the prompt
MODELS = {
    "many_tokens": {"seed": 1},
    "few_tokens": {**FEW, "seed": 5, "initializer_range": 0.2},
    "flat": {**FEW, "seed": 4, "initializer_range": 0.15},
}
PROMPT = [9, 4, 7, 2, 3, 5, 8]
MAX_TOKENS = 10
OPTIONS = list(itertools.product((-1.0, 0.0, 1.0, 2.0), (False, True)))


@pytest.fixture(scope="module")
def models(make_tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {name: make_tiny_model(name, **config) for name, config in MODELS.items()}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_option_and_number_of_outputs(models: dict[str, Path], name: str, width: int) -> None:
    """n only says how many of the `width` outputs are returned, so one run of transformers serves all n."""
    with Engine.from_config(real_config(models[name], search="beam")) as engine:
        for penalty, early in OPTIONS:
            options = {"length_penalty": penalty, "early_stopping": early}
            expected = expected_beams(models[name], PROMPT, width, MAX_TOKENS, **options)
            params = [beam_params(width, n, MAX_TOKENS, **options) for n in range(1, width + 1)]
            outputs = engine.generate([ids(*PROMPT)] * width, params)
            for n, output in enumerate(outputs, 1):
                assert found_beams(output) == expected[:n]
                endings = ["stop" if one[-1] == 0 else "length" for one in expected[:n]]
                assert [one.finish_reason for one in output.completions] == endings
                assert [one.lane for one in output.completions] == list(range(n))
        require_idle(engine)


def test_the_options_matter_and_outputs_stop(models: dict[str, Path]) -> None:
    """Guards the test above."""
    for name in ("few_tokens", "flat"):
        found = [
            expected_beams(models[name], PROMPT, 4, MAX_TOKENS, length_penalty=penalty, early_stopping=early)
            for penalty, early in OPTIONS
        ]
        assert len({str(outputs) for outputs in found}) >= 4
        assert {one[-1] == 0 for outputs in found for one in outputs} == {False, True}
        assert len({len(one) for outputs in found for one in outputs}) >= 4


@pytest.mark.parametrize("width", [2, 5])
def test_without_eos_every_output_has_all_its_tokens(models: dict[str, Path], width: int) -> None:
    expected = expected_beams(models["few_tokens"], PROMPT, width, MAX_TOKENS, eos=())
    with Engine.from_config(real_config(models["few_tokens"], search="beam")) as engine:
        output = engine.generate(ids(*PROMPT), beam_params(width, width, MAX_TOKENS, ignore_eos=True))[0]
    assert found_beams(output) == expected
    assert [len(one) for one in expected] == [MAX_TOKENS] * width


def test_several_ids_end_an_output(make_tiny_model: Callable[..., Path]) -> None:
    """With two ends, three times the width are looked at for lanes to go on with."""
    model = make_tiny_model("two_ends", seed=5, eos_token_id=[0, 3], vocab_size=12, initializer_range=0.2)
    with Engine.from_config(real_config(model, search="beam")) as engine:
        outputs = engine.generate([ids(*PROMPT)] * 2, [beam_params(4, 4, length_penalty=one) for one in (0.0, 1.0)])
    expected = [expected_beams(model, PROMPT, 4, 8, eos=(0, 3), length_penalty=one) for one in (0.0, 1.0)]
    assert [found_beams(one) for one in outputs] == expected
    assert {tokens[-1] for outputs in expected for tokens in outputs} >= {0, 3}


def test_many_prompts_at_once(models: dict[str, Path]) -> None:
    prompts = [[(7 * row + column) % 12 for column in range(1 + row * 5)] for row in range(6)]
    with Engine.from_config(real_config(models["flat"], search="beam")) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in prompts], beam_params(4, 4))
        require_idle(engine)
    assert [found_beams(one) for one in outputs] == [expected_beams(models["flat"], p, 4, 8) for p in prompts]


@pytest.fixture(scope="module")
def five_tokens(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("five", seed=3, vocab_size=5, initializer_range=0.2)


def enumerate_outputs(folder: Path, prompt: list[int], max_tokens: int) -> dict[tuple[int, ...], float]:
    """Every output of a model of five ids, with its log-probability by transformers."""
    paths = list(itertools.product(range(5), repeat=max_tokens))
    with torch.inference_mode():
        logits = peer_of(folder)(torch.tensor([[*prompt, *path] for path in paths])).logits
    logprobs = torch.log_softmax(logits[:, len(prompt) - 1 : -1].double(), -1)
    taken = logprobs.gather(2, torch.tensor(paths)[:, :, None])[:, :, 0].tolist()
    lengths = [path.index(0) + 1 if 0 in path else max_tokens for path in paths]
    return {path[:n]: sum(row[:n]) for path, row, n in zip(paths, taken, lengths, strict=True)}


def test_a_beam_that_drops_nothing_finds_the_most_likely_outputs(five_tokens: Path) -> None:
    """5 ** 3 lanes hold every beginning of four tokens."""
    logprobs = enumerate_outputs(five_tokens, [1, 2, 3], 4)
    best = sorted(logprobs, key=lambda path: -logprobs[path])[:5]
    search: dict[str, Any] = {"use": "beam", "max_width": 125}
    with Engine.from_config(real_config(five_tokens, search=search)) as engine:
        output = engine.generate(ids(1, 2, 3), beam_params(125, 5, 4, length_penalty=0.0))[0]
        require_idle(engine)
    assert found_beams(output) == [list(path) for path in best]


def test_width_one_is_greedy(models: dict[str, Path]) -> None:
    for name, path in models.items():
        with Engine.from_config(real_config(path, search="beam")) as engine:
            greedy = beam_params(1).model_copy(update={"search": None})
            one, other = engine.generate([ids(*PROMPT)] * 2, [beam_params(1), greedy])
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason), name
        assert [one.token_ids] == expected_beams(path, PROMPT, 1, 8)
