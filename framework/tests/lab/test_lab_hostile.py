"""Workloads and traces with numbers and texts beyond all measure: one line that names the place, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from pluglm.assembly.run_config import RunConfig
from pluglm.cli.main import app
from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import MOST, MOST_TOKENS, Amount, Lengths
from pluglm.lab.imports import load_trace
from pluglm.lab.simulate import simulate as simulate_trace
from pluglm.lab.trace import TraceRequest

STREAM = "streams: [{num_arrivals: 3, arrivals: {at_once: true}, prompt: 5, output: 3"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
NINES = "9" * 5000  # Python refuses to read it as an integer
LONE = "\\ud800"  # as YAML and JSON write a surrogate without its partner


def ours(**changes: Any) -> str:
    return json.dumps({"request_id": "a", "arrival_s": 0, "prompt": [["a", 3]], "output_tokens": 2, **changes})


def mooncake(**changes: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 5, "output_length": 3, **changes})


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("w.yaml", STREAM.replace("3", "1000000000000", 1) + "}]", "num_arrivals: Input should be less than"),
        ("w.yaml", STREAM.replace("prompt: 5", "prompt: 3000000000") + "}]", "prompt: a length is 10,000,000 tokens"),
        ("w.yaml", STREAM.replace("output: 3", "output: 1.0e+300") + "}]", "output.constant: Input should be less"),
        ("w.yaml", STREAM + ", prefixes: {num_groups: 1000000000000, length: 4}}]", "num_groups: Input should be"),
        ("w.yaml", STREAM + ", sessions: {turns: 10000000, think_s: 1}}]", "its sessions have 30,000,000 turns"),
        ("w.yaml", STREAM + ", sessions: {turns: 2, think_s: 1.0e+308}}]", "think_s.constant: Input should be less"),
        ("w.yaml", STREAM.replace("at_once: true", "poisson: {rate: 1.0e-320}") + "}]", "arrivals take more than"),
        (
            "w.yaml",
            STREAM.replace("at_once: true", "bursts: {rate: 1, on_s: 1.0e-320, off_s: 9}") + "}]",
            "arrivals take more than",
        ),
        ("w.yaml", STREAM + ", tenants: {a: 1.0e+308, b: 1.0e+308}}]", "tenants.a: Input should be less than"),
        ("w.yaml", f'{STREAM}, tenants: {{"{LONE}": 1}}}}]', "unable to parse raw data as a unicode string"),
        ("w.yaml", f"seed: {NINES}\n{STREAM}}}]", "not valid YAML"),
        ("a.csv", f"{AZURE}2023-11-16,{NINES},3\n", ":2: ContextTokens '9+' is not a whole number"),
        ("a.csv", f"{AZURE}2023-11-16,5,99999999999999\n", ":2: output_tokens: Input should be less than"),
        ("a.csv", f"{AZURE}2023-11-16,99999999999999,3\n", ":2: prompt.0.1: Input should be less than"),
        ("a.csv", f'{AZURE}2023-11-16,5,"{"9" * 200_000}"\n', ":2: not valid CSV: field larger than"),
        ("m.jsonl", mooncake(input_length=10**15), ":1: prompt.0.1: Input should be less than"),
        ("m.jsonl", mooncake(timestamp=1e308), ":1: timestamp: Input should be less than"),
        ("t.jsonl", ours(prompt=[["a", 10**15]]), ":1: prompt.0.1: Input should be less than"),
        (
            "t.jsonl",
            ours(prompt=[["a", MOST_TOKENS], ["b", 1]]),
            "a prompt of 10,000,001 tokens; 10,000,000 is the most",
        ),
        ("t.jsonl", ours(arrival_s=1e308), ":1: arrival_s: Input should be less than"),
        ("t.jsonl", ours(tenant="\ud800"), ":1: tenant: .* unicode string"),
        ("t.jsonl", ours(salt="\ud800"), ":1: salt: .* unicode string"),
        ("t.jsonl", ours(prompt=[["\ud800", 3]]), ":1: prompt.0.0: .* unicode string"),
    ],
)
def test_what_no_machine_holds_is_refused_in_one_line(name: str, text: str, reason: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "data",
    [{"lognormal": {"median": 10, "sigma": 1e12}}, {"exponential": 1e11}, {"lognormal": {"median": 1e12, "sigma": 9}}],
)
def test_draws_beyond_all_measure_are_the_largest(data: dict[str, Any]):
    generator = np.random.default_rng(0)
    assert Lengths.model_validate(data).draw(generator, 1000).max() == MOST_TOKENS
    assert Amount.model_validate(data).draw(generator, 1000).max() <= MOST


def test_azure_times_of_any_year_begin_at_0(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(f"{AZURE}0001-01-01T00:00:30+23:59,5,3\n0001-01-01T00:00:00+23:59,5,3\n")
    assert [(one.request_id, one.arrival_s) for one in load_trace(path)] == [("line-3", 0.0), ("line-2", 30.0)]


@pytest.mark.parametrize("key", ["step_base_s", "token_s", "row_s", "chunk_s", "context_s"])
def test_a_price_whose_sum_is_no_number_is_refused(key: str, make_config: Any, ask: Any):
    """The largest that is allowed still gives a summary of numbers."""
    with pytest.raises(ConfigError, match=f"{key}: Input should be less than"):
        simulate_trace(make_config({key: 1e308}), (ask("a", 40, 4),))
    run = simulate_trace(make_config({key: MOST}), (ask("a", 40, 4), ask("b", 40, 4, at=MOST)))
    assert all(one.completed for one in run.outcomes)
    assert np.isfinite(run.clock_s)


def test_an_odd_priority_is_refused_alone(make_config: Any):
    def ask(name: str, priority: int) -> TraceRequest:
        return TraceRequest(request_id=name, arrival_s=0, prompt=((name, 3),), output_tokens=2, priority=priority)

    run = simulate_trace(make_config(scheduler={"use": "priority", "ageing": "1s"}), (ask("a", 10**400), ask("b", 1)))
    assert [one.finish_reason for one in run.outcomes] == ["refused", "length"]
    assert "priority must be an integer from" in str(run.outcomes[0].error)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    workload, config = tmp_path / "workload.yaml", tmp_path / "run.yaml"
    workload.write_text(STREAM.replace("at_once: true", "poisson: {rate: 1}") + ', tenants: {"x\\n\\e[31m": 1}}]')
    config.write_text("{backend: fake, kv: {use: paged, num_blocks: 8}}")
    return workload, config


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--speed", "inf"], "--speed inf: give a number above 0"),
        (["--speed", "nan"], "--speed nan: give a number above 0"),
        (["--speed", "1e-300"], "speed 1e-300: the last request would come after more than"),
        (["--ttft-slo", "inf"], "--ttft-slo inf: give a number of seconds"),
        (["--tpot-slo", "inf"], "--tpot-slo inf: give a number of seconds"),
    ],
)
def test_an_odd_number_on_the_command_line_is_one_line(arguments: list[str], reason: str, files: tuple[Path, Path]):
    result = simulate(*files, *arguments)
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in line


def test_a_tenants_name_does_not_write_on_the_terminal(files: tuple[Path, Path]):
    """Control characters in a file of somebody else's would move the cursor, or look like other rows."""
    result = simulate(*files, "--by", "tenant")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert r"tenant 'x\n\x1b[31m': goodput, tokens/s" in result.stdout


def test_the_config_is_read_as_strictly(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(f'hooks: [{{use: events, path: "{LONE}"}}]')
    with pytest.raises(ConfigError, match="holds a lone surrogate"):
        RunConfig.from_file(path)
