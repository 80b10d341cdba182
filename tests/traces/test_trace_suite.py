"""500 random traces keep every invariant; `make trace-test` runs 10,000 of them. Expected tokens are a closed form.

What a failure prints is the smallest trace that fails alike, for `python tests/traces/replay.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run import TWICE_EVERY, run_some
from trace_case import from_json, to_json
from trace_choices import evictions, managers, pairs, schedulers
from trace_generate import make_trace
from trace_oracle import check_trace
from trace_shrink import same_failure, shrink

from pluglm.assembly.registry import list_entries

NUM_TRACES, PART, SEED = 500, 20, 0


FOUND = [json.loads(line) for line in (Path(__file__).parent / "found.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("one", FOUND, ids=lambda one: one["what"])
def test_what_was_found_once_stays_mended(one: dict[str, Any]) -> None:
    """The shrunk traces of bugs that the harness has found."""
    violation = check_trace(from_json(json.dumps(one["trace"])), twice=True).violation
    assert violation is None, violation


@pytest.mark.parametrize("first", range(0, NUM_TRACES, PART))
def test_random_traces_keep_every_invariant(first: int) -> None:
    for index in range(first, first + PART):
        trace = make_trace(index, SEED)
        violation = check_trace(trace, twice=index % TWICE_EVERY == 0).violation
        if violation is not None:
            small = shrink(trace, same_failure(violation))
            pytest.fail(f"{violation}\npython tests/traces/replay.py '{to_json(small)}'")


def test_every_installed_scheduler_meets_every_installed_manager_equally_often() -> None:
    names = {entry.name for kind in ("scheduler", "scheduling_policy") for entry in list_entries(kind)}
    assert names == {name for name in schedulers() if not name.startswith("test:")}
    assert {entry.name for entry in list_entries("kv")} == {*managers()}
    traces = [make_trace(index, SEED) for index in range(NUM_TRACES)]
    met = Counter((trace.policy, trace.kv) for trace in traces)
    assert met.keys() == {*pairs()}
    assert max(met.values()) - min(met.values()) <= 1
    used = {trace.kv_config["eviction"]["use"] for trace in traces if "eviction" in trace.kv_config}
    assert used == {*evictions()}


def test_the_traces_do_what_they_are_for() -> None:
    """A harness in which nothing is preempted, adopted, copied or evicted would find nothing."""
    counts = run_some(SEED, 0, 120).counts
    for name in ("prefix hits", "copies on write", "evictions", "cancelled", "refused at the door"):
        assert counts[name] > 20, name
    assert counts["blocks loaded from a tier"] > 5
    for mode in ("recompute", "offload", "pause"):
        assert counts[f"preempted: {mode}"] > 20, mode
    for reason in ("stop", "length", "cancelled", "deadline", "error"):
        assert counts[f"lanes ended: {reason}"] > 5, reason


def test_the_script_runs_traces_in_processes_and_counts_them() -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--traces", "12", "--jobs", "2", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert (numbers["traces"], numbers["violations"]) == ("12", "0")


def test_a_trace_is_one_line_and_back() -> None:
    for index in range(200):
        trace = make_trace(index, SEED)
        line = to_json(trace)
        assert "\n" not in line
        assert from_json(line) == trace
