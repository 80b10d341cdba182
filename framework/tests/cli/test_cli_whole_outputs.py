"""`pluglm run` with what belongs to whole outputs and prompts: best_of, echo, prompt_logprobs, bad_words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pluglm import Engine, RequestOutput, RunConfig

PROMPT = "Why is the sky blue?"
WARM = ("--set", "sampling.temperature=1.5")


def library(config: Path, **sampling: Any) -> RequestOutput:
    changes = {f"sampling.{name}": value for name, value in {"temperature": 1.5, **sampling}.items()}
    with Engine.from_config(RunConfig.from_file(config, changes)) as engine:
        return engine.generate([PROMPT])[0]


def test_the_best_text_is_printed(pluglm: Any, fake_config: Path) -> None:
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--raw", *WARM, "--set", "sampling.best_of=5")
    assert (outcome.code, outcome.out) == (0, library(fake_config, best_of=5).text + "\n")
    sets = ("--set", "sampling.best_of=5", "--set", "sampling.n=2")
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--raw", *WARM, *sets)
    first, second = (one.text for one in library(fake_config, best_of=5, n=2).completions)
    assert outcome.out == f"--- output 1 of 2\n{first}\n--- output 2 of 2\n{second}\n"


def test_echo_is_in_text_and_json(pluglm: Any, fake_config: Path) -> None:
    sets = ("--raw", *WARM, "--set", "sampling.echo=true")
    text = library(fake_config).text
    assert pluglm("run", fake_config, "--prompt", PROMPT, *sets).out == f"{PROMPT}{text}\n"
    assert json.loads(pluglm("run", fake_config, "--prompt", PROMPT, *sets, "--json").out)["text"] == PROMPT + text


def test_prompt_logprobs_are_in_json_alone(pluglm: Any, fake_config: Path) -> None:
    sets = ("--raw", *WARM, "--set", "sampling.prompt_logprobs=2")
    found = json.loads(pluglm("run", fake_config, "--prompt", PROMPT, *sets, "--json").out)["prompt_logprobs"]
    expected = library(fake_config, prompt_logprobs=2).prompt_logprobs
    assert found[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert other is not None
        assert (one["token_id"], one["rank"]) == (other.token_id, other.rank)
        assert one["logprob"] == pytest.approx(other.logprob)
        assert list(one["top"]) == [str(token) for token in other.top]
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, *sets)
    assert outcome.code == 2
    assert "sampling.prompt_logprobs shows only in JSON; add --json" in outcome.err


def test_a_line_of_a_prompts_file_may_ask_for_all_of_it(pluglm: Any, fake_config: Path, tmp_path: Path) -> None:
    params = {"bad_words": ["e"], "best_of": 3, "echo": True, "prompt_logprobs": 0}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT, "params": {"temperature": 1.5, **params}}))
    outcome = pluglm("run", fake_config, "--prompts-file", tmp_path / "prompts.jsonl")
    found = json.loads(outcome.out)
    expected = library(fake_config, **params)
    assert (outcome.code, found["text"]) == (0, expected.text)
    assert found["token_ids"] == expected.token_ids
    assert len(found["prompt_logprobs"]) == found["metrics"]["num_prompt_tokens"]
