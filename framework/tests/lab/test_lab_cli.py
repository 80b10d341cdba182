"""`pluglm simulate` through typer's runner: tables, records, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pluglm.cli.main import app
from pluglm.lab.step_time import read_step_time
from pluglm.lab.trace import read_trace

WORKLOAD = """
seed: 3
streams:
  - num_arrivals: 12
    arrivals: {poisson: {rate: 0.5}}
    prompt: {uniform: {min: 4, max: 40}}
    output: {uniform: {min: 1, max: 6}}
    tenants: {a: 1, b: 1}
    priorities: {0: 1, 3: 1}
"""
CONFIG = """
backend: {use: fake, step_base_s: 1.0, token_s: 0.25}
kv: {use: paged, block_size: 8, num_blocks: 32}
engine: {max_num_seqs: 2, max_step_tokens: 32}
"""

BROKEN = """
from pluglm_schedulers.fcfs import FcfsPolicy


class Broken(FcfsPolicy):
    def order_waiting(self, view):
        return 1 // 0
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    workload, config = tmp_path / "workload.yaml", tmp_path / "run.yaml"
    workload.write_text(WORKLOAD)
    config.write_text(CONFIG)
    return workload, config


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


def rows_of(result: Result) -> dict[str, list[str]]:
    """Measure -> its cells, which stand two spaces apart."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_the_table_has_the_numbers_of_the_record(files, tmp_path: Path):
    output = tmp_path / "record.json"
    result = simulate(*files, "--output", output)
    assert result.exit_code == 0, result.output
    rows, record = rows_of(result), json.loads(output.read_text())
    run = record["runs"]["simulated"]
    assert rows["measure"] == ["simulated"]
    assert rows["requests"] == rows["length"] == ["12"]
    assert rows["time to first token, p90"] == [f"{1000 * run['ttft']['p90']:,.1f} ms"]
    assert rows["time per output token, p50"] == [f"{1000 * run['tpot']['p50']:,.1f} ms"]
    assert rows["arrival to end, p99"] == [f"{1000 * run['total']['p99']:,.1f} ms"]
    assert rows["throughput, tokens/s"] == [f"{run['output_tokens_per_s']:,.1f}"]
    assert rows["KV pool, tokens"] == ["256"]
    assert rows["steps"] == [str(run["num_steps"])]
    assert record["trace"]["num_requests"] == 12


def test_policies_side_by_side(files, tmp_path: Path):
    output = tmp_path / "record.json"
    result = simulate(*files, "--compare", "scheduler.use=fcfs,priority", "--by", "tenant", "--output", output)
    rows, runs = rows_of(result), json.loads(output.read_text())["runs"]
    assert rows["scheduler.use"] == ["fcfs", "priority"]
    assert list(runs) == ["scheduler.use=fcfs", "scheduler.use=priority"]
    assert rows["tenant a: time to first token, p50"] == [
        f"{1000 * run['groups']['a']['ttft']['p50']:,.1f} ms" for run in runs.values()
    ]
    first, second = runs.values()
    assert first["decisions"] != second["decisions"]
    assert first["num_output_tokens"] == second["num_output_tokens"]


def test_every_combination_and_keys_that_survive_a_named_component(files):
    """--set keys of a component hold for the component that --compare names, which drops those of the file."""
    result = simulate(
        *files,
        "--set",
        "kv.num_blocks=16",
        "--compare",
        "kv.use=paged,hash_prefix",
        "--compare",
        "engine.max_num_seqs=1,2",
    )
    rows = rows_of(result)
    assert rows["kv.use"] == ["paged", "paged", "hash_prefix", "hash_prefix"]
    assert rows["engine.max_num_seqs"] == ["1", "2", "1", "2"]
    assert rows["KV pool, tokens"] == ["128", "128", "256", "256"]  # block_size: 8 of the file, 16 by default
    assert "note: the KV pools differ, 128 to 256 tokens" in result.stderr


def test_equal_pools_and_other_comparisons_have_no_note(files):
    sizes = ("--set", "kv.num_blocks=16", "--set", "kv.block_size=8")
    assert simulate(*files, *sizes, "--compare", "kv.use=paged,hash_prefix").stderr == ""
    assert simulate(*files, "--compare", "kv.num_blocks=16,32").stderr == ""


def test_measured_stands_beside_what_is_compared(files, tmp_path: Path):
    result = simulate(*files, "--fit", tmp_path / "t.json", "--compare", "engine.max_num_seqs=1,2")
    assert rows_of(result)["engine.max_num_seqs"] == ["measured", "1", "2"]


def test_a_whole_slot_can_be_compared(files):
    rows = rows_of(simulate(*files, "--compare", "kv={use: paged, num_blocks: 9},{use: contiguous, region_tokens: 64}"))
    assert rows["KV pool, tokens"] == ["144", "128"]


def test_a_written_trace_is_the_workload(files, tmp_path: Path):
    trace, record = tmp_path / "trace.jsonl", tmp_path / "record.json"
    first = simulate(*files, "--trace-output", trace, "--output", record)
    digest = json.loads(record.read_text())["trace"]["digest"]
    second = simulate(trace, files[1], "--output", record)
    assert json.loads(record.read_text())["trace"]["digest"] == digest
    same = {name: cells for name, cells in rows_of(first).items() if name != "seconds in real time"}
    assert same.items() <= rows_of(second).items()


def test_limit_and_speed_change_the_trace(files, tmp_path: Path):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    simulate(*files, "--trace-output", whole)
    simulate(*files, "--limit", 5, "--speed", 2, "--trace-output", part)
    expected = [(one.request_id, one.arrival_s / 2) for one in read_trace(whole)[:5]]
    assert [(one.request_id, one.arrival_s) for one in read_trace(part)] == expected


def test_targets_bound_goodput(files):
    everything = rows_of(simulate(*files))
    none = rows_of(simulate(*files, "--ttft-slo", "0.001"))
    assert everything["goodput, requests/s"] == everything["throughput, requests/s"] != ["0.00"]
    assert none["goodput, requests/s"] == ["0.00"]
    assert none["throughput, requests/s"] == everything["throughput, requests/s"]


def test_fit_measures_then_simulates_with_what_it_found(files, tmp_path: Path):
    """On the fake backend the run is virtual as well, so what is found is what the config says."""
    fitted = tmp_path / "step-time.json"
    rows = rows_of(simulate(*files, "--fit", fitted))
    found = read_step_time(fitted)
    assert rows["measure"] == ["measured", "simulated"]
    assert (found.step_base_s, found.token_s) == pytest.approx((1.0, 0.25), rel=1e-6)
    assert max(found.row_s, found.chunk_s, found.context_s) < 1e-9
    measured, simulated = rows["time to first token, p50"]
    assert measured == simulated
    again = rows_of(simulate(*files, "--step-time", fitted, "--set", "backend.step_base_s=9"))
    assert again["time to first token, p50"] == [simulated]


def test_a_plot_has_a_curve_for_each_run(files, tmp_path: Path):
    plot = tmp_path / "ttft.svg"
    assert simulate(*files, "--compare", "scheduler.use=fcfs,fair", "--plot", plot).exit_code == 0
    assert plot.read_text().count("<polyline") == 2


def test_a_refusal_is_noted_and_a_failing_component_is_an_error(files, tmp_path: Path):
    refused = simulate(*files, "--set", "model.max_model_len=20")
    assert refused.exit_code == 0
    assert int(rows_of(refused)["refused"][0]) > 0
    assert "note: simulated: " in refused.stderr
    assert "the context holds 20 tokens" in refused.stderr
    (tmp_path / "broken.py").write_text(BROKEN)
    failed = simulate(*files, "--set", "scheduler.use=broken:Broken", "--quiet")
    assert failed.exit_code == 1
    assert "error: simulated: " in failed.stderr
    assert "scheduler 'broken:Broken' raised ZeroDivisionError" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--compare", "scheduler.use"], "write KEY.PATH=VALUE,VALUE"),
        (["--compare", "scheduler.use="], "write KEY.PATH=VALUE,VALUE"),
        (["--compare", "kv={use: paged"], "the values are not valid YAML"),
        (["--compare", "scheduler.use=fcfs,fcsf"], "did you mean 'fcfs'?"),
        (["--compare", "engine.max_num_seq=1,2"], "did you mean 'max_num_seqs'?"),
        (["--set", "drafter=ngram"], "drafter 'ngram' cannot be simulated"),
        (["--speed", "0"], "--speed 0: give a number above 0"),
        (["--fit", "a.json", "--step-time", "b.json"], "--fit and --step-time cannot go together"),
        (["--step-time", "none.json"], "none.json: cannot be read"),
        (["--output", "/none/record.json"], "--output /none/record.json: cannot be written"),
        (["--trace-output", "/none/trace.jsonl"], "/none/trace.jsonl: cannot be written"),
        (["--fit", "/none/step-time.json"], "--fit /none/step-time.json: cannot be written"),
        (["--plot", "plot.png"], "--plot plot.png: the drawing is SVG"),
        (["--plot", "/none/plot.svg"], "--plot /none/plot.svg: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_has_run(arguments: list[str], reason: str, files):
    result = simulate(*files, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert reason in line
    assert result.stdout == ""


def test_a_bad_workload_and_a_bad_config_are_one_line(files, tmp_path: Path):
    workload, config = files
    workload.write_text(WORKLOAD.replace("num_arrivals", "num_arivals"))
    assert "streams.0.num_arivals: unknown key, did you mean 'num_arrivals'?" in simulate(workload, config).stderr
    assert "must end in .yaml" in simulate(tmp_path / "x.txt", config).stderr
    assert "cannot be read" in simulate(tmp_path / "x.csv", config).stderr
    result = simulate(workload, tmp_path / "none.yaml")
    assert result.exit_code == 2
