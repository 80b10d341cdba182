"""What `pluglm run` writes, compared with what the library gives for the same prompts and config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pluglm import Engine, RunConfig, SamplingParams

PROMPT = "Why is the sky blue?"
CHAT = [{"role": "user", "content": PROMPT}]


def _library(config: Path, prompt: object):
    with Engine.from_config(config) as engine:
        return engine.generate([prompt])[0]


def test_a_prompt_goes_through_the_chat_template(pluglm, fake_config: Path):
    outcome = pluglm("run", fake_config, "--prompt", PROMPT)
    assert outcome.code == 0
    assert outcome.out == _library(fake_config, CHAT).text + "\n"


def test_raw_sends_the_prompt_as_it_is(pluglm, fake_config: Path):
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--raw")
    assert outcome.out == _library(fake_config, PROMPT).text + "\n"
    assert outcome.out != _library(fake_config, CHAT).text + "\n"


def test_a_piped_prompt_is_the_same_as_prompt(pluglm, fake_config: Path):
    piped = pluglm("run", fake_config, stdin=PROMPT + "\n")
    assert piped.out == pluglm("run", fake_config, "--prompt", PROMPT).out


def test_json_is_one_object_and_nothing_else_on_stdout(pluglm, fake_config: Path):
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--json")
    expected = _library(fake_config, CHAT)
    found = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert (found["finish_reason"], found["error"], found["seed"]) == ("length", None, 7)
    assert found["metrics"]["num_output_tokens"] == 6
    # the fake backend's documented cost, 0.01 s a step and 0.0001 s a token: 5 single-token steps after the first
    assert found["metrics"]["tpot_s"] == pytest.approx(0.0101)


def test_the_tables_name_every_component_and_what_is_not_used(pluglm, fake_config: Path):
    err = pluglm("run", fake_config, "--prompt", PROMPT).err
    for expected in ("pluglm.backends.fake:FakeBackend", "pluglm_samplers.chain:ChainSampler", "peak memory (RSS)"):
        assert expected in err
    assert "attention: never called, backend fake computes none" in err


def test_the_tables_say_what_auto_chose(pluglm, fake_config: Path):
    outcome = pluglm(
        "run", fake_config, "--set", "backend.use=auto", "--prompt", "Hi", "--set", "sampling.max_tokens=1"
    )
    assert outcome.code == 0
    assert "backend: auto chose c" in outcome.err


def test_quiet_leaves_stderr_empty(pluglm, fake_config: Path):
    assert pluglm("run", fake_config, "--prompt", PROMPT, "--quiet").err == ""


def test_a_fresh_seed_is_reported_and_gives_the_same_text_again(pluglm, fake_config: Path):
    first = json.loads(pluglm("run", fake_config, "--set", "sampling.seed=null", "--prompt", "x", "--json").out)
    again = pluglm("run", fake_config, "--set", f"sampling.seed={first['seed']}", "--prompt", "x", "--json")
    assert json.loads(again.out)["token_ids"] == first["token_ids"]


def test_output_holds_the_text_and_stdout_stays_empty(pluglm, fake_config: Path, tmp_path: Path):
    target = tmp_path / "answer.txt"
    target.write_text("what was there before, and longer than the answer is going to be " * 9)
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--output", target)
    assert (outcome.code, outcome.out) == (0, "")
    assert target.read_text() == _library(fake_config, CHAT).text + "\n"


def test_a_run_that_fails_to_load_leaves_the_old_output_alone(pluglm, fake_config: Path, tmp_path: Path):
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text("old")
    for target in (old, new):
        assert pluglm("run", fake_config, "--prompt", "x", "--set", "model.path=nope", "--output", target).code == 2
    assert old.read_text() == "old"
    assert not new.exists()


def test_a_prompts_file_gives_one_object_a_line_in_its_order(pluglm, fake_config: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPT, "id": "plain", "params": {"max_tokens": 3, "seed": 11}},
        {"messages": CHAT, "id": 5},
        {"prompt_token_ids": [1, 2, 3], "params": {"temperature": 0, "max_tokens": 2, "logprobs": 1}},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    outcome = pluglm("run", fake_config, "--prompts-file", file)
    found = [json.loads(line) for line in outcome.out.splitlines()]
    sampling = RunConfig.from_file(fake_config).sampling
    params = [SamplingParams(**{**sampling.model_dump(), **line.get("params", {})}) for line in lines]
    with Engine.from_config(fake_config) as engine:
        expected = engine.generate([PROMPT, CHAT, {"prompt_token_ids": [1, 2, 3]}], params)
    assert outcome.code == 0
    assert [one["token_ids"] for one in found] == [one.token_ids for one in expected]
    assert [one["text"] for one in found] == [one.text for one in expected]
    assert [(one["index"], one.get("id")) for one in found] == [(0, "plain"), (1, 5), (2, None)]
    assert [len(one.get("logprobs", ())) for one in found] == [0, 0, 2]
    assert [one["seed"] for one in found] == [11, 7, 7]


def test_a_refused_prompt_is_exit_2_by_line_and_the_others_run(pluglm, fake_config: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [987654321]}\n{"prompt_token_ids": [6]}\n')
    outcome = pluglm("run", fake_config, "--prompts-file", file)
    found = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 2
    assert [one["finish_reason"] for one in found] == ["length", "refused", "length"]
    assert [one["metrics"] is None for one in found] == [False, True, False]
    assert len(outcome.error_lines) == 1
    assert f"{file}:2: refused: " in outcome.error_lines[0]
    assert "987654321" in outcome.error_lines[0]


def test_a_malformed_prompts_file_runs_nothing_and_names_every_bad_line(pluglm, fake_config: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": 3}\nnot json\n')
    outcome = pluglm("run", fake_config, "--prompts-file", file)
    assert (outcome.code, outcome.out) == (2, "")
    assert [line.removeprefix(f"error: {file}:")[:2] for line in outcome.error_lines] == ["2:", "3:", " n"]
