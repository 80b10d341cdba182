"""Every ready config resolves, and runs: the quickstart and the dry run here, the others with the slow tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def test_there_are_ready_configs():
    assert "quickstart.yaml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_checks(pluglm, config: Path):
    outcome = pluglm("config", "check", config)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{config}: ok")


def test_the_quickstart_answers_with_the_real_model(pluglm, configs: Path):
    outcome = pluglm(
        "run",
        configs / "quickstart.yaml",
        "--prompt",
        "What is the capital of France?",
        "--set",
        "sampling.temperature=0",
    )
    assert outcome.code == 0, outcome.err
    assert "Paris" in outcome.out
    assert "drafts accepted" in outcome.err


def test_the_dry_run_writes_its_events(pluglm, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outcome = pluglm("run", configs / "dry-run.yaml", "--prompts-file", configs / "prompts.jsonl")
    events = [json.loads(line) for line in (tmp_path / "dry-run.events.jsonl").read_text().splitlines()]
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == len((configs / "prompts.jsonl").read_text().splitlines())
    assert sum(one["event"] == "finished" for one in events) == len(outcome.out.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_runs(pluglm, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outcome = pluglm("run", config, "--prompts-file", config.parent / "prompts.jsonl", "--set", "sampling.max_tokens=8")
    assert outcome.code == 0, outcome.err
    assert all(json.loads(line)["error"] is None for line in outcome.out.splitlines())
