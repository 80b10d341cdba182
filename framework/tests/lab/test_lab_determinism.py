"""Invariant I13 of a simulation, and a real run: the same trace, config and seed plan the same and count the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pluglm import RunConfig
from pluglm.kernel.errors import IncompatibleError
from pluglm.lab.imports import load_trace
from pluglm.lab.metrics import Targets
from pluglm.lab.simulate import measure, simulate, simulated_config
from pluglm.lab.step_time import StepTime

CHAT = Path(__file__).parents[3] / "configs/workloads/chat.yaml"
SCRIPT = """
import json, pathlib, sys
from pluglm import RunConfig
from pluglm.lab.imports import load_trace
from pluglm.lab.metrics import Targets
from pluglm.lab.simulate import simulate
run = simulate(RunConfig.from_dict(json.loads(sys.argv[2])), load_trace(pathlib.Path(sys.argv[1]))[:80])
print(json.dumps(run.to_json(Targets(), "tenant")))
"""


def config(scheduler: str) -> dict:
    return {
        "backend": {"use": "fake", "step_base_s": 0.02, "token_s": 0.0005},
        "kv": {"use": "radix", "block_size": 8, "num_blocks": 160},
        "scheduler": scheduler,
        "engine": {"max_num_seqs": 6, "max_step_tokens": 128},
    }


def record(scheduler: str) -> dict:
    run = simulate(RunConfig.from_dict(config(scheduler)), load_trace(CHAT)[:80])
    return {key: value for key, value in run.to_json(Targets(), "tenant").items() if key != "wall_s"}


@pytest.mark.parametrize("scheduler", ["fcfs", "priority", "fair"])
def test_the_same_decisions_and_numbers_in_any_process(scheduler: str):
    here = record(scheduler)
    assert here == record(scheduler)
    command = [sys.executable, "-c", SCRIPT, str(CHAT), json.dumps(config(scheduler))]
    done = subprocess.run(command, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True)
    there = json.loads(done.stdout)
    assert {key: value for key, value in there.items() if key != "wall_s"} == json.loads(json.dumps(here))
    assert here["num_preemptions"] > 0


def test_another_policy_decides_otherwise():
    assert record("fcfs")["decisions"] != record("priority")["decisions"]


def test_the_simulated_config_keeps_everything_but_the_backend():
    given = RunConfig.from_dict({"backend": "cpu", "quantizer": "int8", "kv": {"use": "paged", "block_size": 4}})
    found = simulated_config(given, StepTime(step_base_s=3.0, token_s=2.0))
    assert found.backend.options == {
        "logits": "cheap", "vocab_size": 1024, "step_base_s": 3.0, "token_s": 2.0, "row_s": 0.0, "chunk_s": 0.0,
        "context_s": 0.0,
    }  # fmt: skip
    assert found.quantizer is None
    assert found.model_copy(update={"backend": given.backend, "quantizer": given.quantizer}) == given


def test_a_fake_backend_keeps_its_own_keys():
    given = RunConfig.from_dict({"backend": {"use": "fake", "step_base_s": 0.5, "memory_bytes": 999, "logits": "full"}})
    assert simulated_config(given).backend.options == {
        "step_base_s": 0.5, "memory_bytes": 999, "logits": "full", "vocab_size": 1024
    }  # fmt: skip


def test_a_drafter_cannot_be_simulated():
    with pytest.raises(IncompatibleError, match=r"drafter 'ngram' cannot be simulated: .*; set drafter=null"):
        simulated_config(RunConfig.from_dict({"drafter": "ngram"}))


def test_a_real_run_is_measured(ask):
    """On the default model: every prompt token and every output token but the last is computed once."""
    trace = (ask("a", 20, 3), ask("b", 9, 2, at=0.05), ask("c", 4, 2, at=0.02, after="a"))
    given = RunConfig.from_dict({"backend": "cpu", "engine": {"max_step_tokens": 16, "kv_memory": 1 << 24}})
    run = measure(given, trace)
    a, b, c = run.outcomes
    assert [one.finish_reason for one in run.outcomes] == ["length"] * 3
    assert (a.num_prompt, b.num_prompt, c.num_prompt) == (20, 9, 20 + 3 + 4)
    assert c.arrival_s == a.finished_s + 0.02
    assert b.arrival_s == 0.05
    assert min(one.ttft_s for one in run.outcomes) > 0
    assert sum(step.num_tokens for step in run.steps) == (20 + 2) + (9 + 1) + (27 + 1)
    assert sum(step.num_rows for step in run.steps) == 3 + 2 + 2
    assert 0 < sum(step.seconds for step in run.steps) <= run.clock_s
