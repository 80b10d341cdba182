"""Workload files become traces: what the file says, the same in every process; bad files are one line."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pluglm.kernel.errors import ConfigError
from pluglm.lab.generate import generate
from pluglm.lab.trace import trace_digest
from pluglm.lab.workload import Workload, read_workload

STREAM = {
    "num_arrivals": 400,
    "arrivals": {"poisson": {"rate": 2}},
    "prompt": 10,
    "output": {"uniform": {"min": 1, "max": 9}},
}
EXAMPLES = sorted((Path(__file__).parents[3] / "configs/workloads").glob("*.yaml"))


def trace_of(seed: int = 1, **stream):
    return generate(Workload.model_validate({"seed": seed, "streams": [{**STREAM, **stream}]}))


def test_a_plain_stream():
    trace = trace_of()
    assert [one.request_id for one in trace] == [f"request-{i}" for i in range(400)]
    assert {one.prompt[0][1] for one in trace} == {10}
    assert len({one.prompt[0][0] for one in trace}) == 400
    assert {one.output_tokens for one in trace} == set(range(1, 10))
    assert [one.arrival_s for one in trace] == sorted(one.arrival_s for one in trace)
    assert {(one.tenant, one.priority, one.deadline_s, one.cancel_s, one.after, one.salt) for one in trace} == {
        ("", 0, None, None, None, "")
    }


def test_weights_and_shares():
    trace = trace_of(
        num_arrivals=4000,
        tenants={"a": 3, "b": 1},
        priorities={0: 1, 5: 1},
        deadlines={"after_s": 20, "share": 0.25},
        cancellations={"after_s": {"uniform": {"min": 1, "max": 2}}, "share": 0.1},
        salt_by_tenant=True,
    )
    share = {key: count / 4000 for key, count in Counter(one.tenant for one in trace).items()}
    assert share["a"] == pytest.approx(0.75, abs=0.03)
    assert sum(one.priority == 5 for one in trace) / 4000 == pytest.approx(0.5, abs=0.03)
    assert sum(one.deadline_s == 20 for one in trace) / 4000 == pytest.approx(0.25, abs=0.03)
    cancelled = [one.cancel_s for one in trace if one.cancel_s is not None]
    assert len(cancelled) / 4000 == pytest.approx(0.1, abs=0.02)
    assert all(1 <= one <= 2 for one in cancelled)
    assert all(one.salt == one.tenant for one in trace)


def test_prefix_groups_are_as_popular_as_zipf_says():
    """Weights 1, 1/2, 1/3, 1/4 for exponent 1: shares 12, 6, 4 and 3 of 25; 80 % of the prompts have one."""
    trace = trace_of(num_arrivals=5000, prefixes={"num_groups": 4, "length": {"values": [32, 64]}, "share": 0.8})
    prefixes = [one.prompt[0] for one in trace if len(one.prompt) == 2]
    assert len(prefixes) / 5000 == pytest.approx(0.8, abs=0.02)
    lengths = dict(prefixes)
    assert set(lengths.values()) <= {32, 64}
    assert len(set(prefixes)) == len(lengths) == 4
    counts = sorted(Counter(prefixes).values(), reverse=True)
    for count, share in zip(counts, (12, 6, 4, 3), strict=True):
        assert count / len(prefixes) == pytest.approx(share / 25, abs=0.02)


def test_sessions_are_chains_of_turns():
    trace = trace_of(
        num_arrivals=50,
        sessions={"turns": {"values": [1, 3]}, "think_s": {"uniform": {"min": 2, "max": 3}}},
        prefixes={"num_groups": 1, "length": 7},
        tenants={"a": 1, "b": 1},
    )
    known = {one.request_id: one for one in trace}
    firsts = [one for one in trace if one.after is None]
    assert len(firsts) == 50
    assert set(Counter(one.request_id.split(".")[0] for one in trace).values()) == {1, 3}
    for before, one in itertools.pairwise(trace):
        if one.after is not None:
            assert one.after == before.request_id  # so that the first N requests of a trace are a trace
            assert 2 <= one.arrival_s <= 3
            assert len(one.prompt) == 1
            assert one.tenant == known[one.after].tenant


def test_streams_are_merged_by_arrival_and_do_not_share_prompts():
    streams = [{**STREAM, "name": name, "num_arrivals": 50} for name in ("x", "y")]
    trace = generate(Workload.model_validate({"seed": 3, "streams": streams}))
    assert [one.arrival_s for one in trace] == sorted(one.arrival_s for one in trace)
    assert len({one.prompt[0][0] for one in trace}) == 100
    assert [one.arrival_s for one in trace if one.request_id.startswith("x")] != [
        one.arrival_s for one in trace if one.request_id.startswith("y")
    ]


def test_changing_one_distribution_leaves_the_others_as_drawn():
    before, after = trace_of(), trace_of(prompt={"uniform": {"min": 5, "max": 50}}, tenants={"a": 1, "b": 1})
    assert [one.arrival_s for one in before] == [one.arrival_s for one in after]
    assert [one.output_tokens for one in before] == [one.output_tokens for one in after]


def test_the_seed_fixes_the_trace_in_every_process():
    """The digest is of the whole trace, also where strings are hashed with another secret."""
    code = (
        "import sys, pathlib; from pluglm.lab.imports import load_trace; from pluglm.lab.trace import trace_digest;"
        "print(trace_digest(load_trace(pathlib.Path(sys.argv[1]))))"
    )
    here = trace_digest(generate(read_workload(EXAMPLES[0])))
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", code, str(EXAMPLES[0])]
        done = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == here
    assert trace_of(seed=1) == trace_of(seed=1) != trace_of(seed=2)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_workloads(path: Path):
    trace = generate(read_workload(path))
    assert len({one.request_id for one in trace}) == len(trace) > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("streams: [", r"bad.yaml: not valid YAML: .*line 1"),
        ("- a", "the top level must be a mapping"),
        ("streams: []", "streams: Tuple should have at least 1 item|streams: .*at least 1 item"),
        ("streams: [{arrivals: {at_once: true}, prompt: 1, output: 1}]", "give num_arrivals, or arrivals.times"),
        (
            "streams: [{num_arrivals: 2, arrivals: {times: [1]}, prompt: 1, output: 1}]",
            "give num_arrivals, or arrivals.times",
        ),
        (
            "streams: [{num_arrivals: 2, arrivals: {poisson: {rat: 1}}, prompt: 1, output: 1}]",
            r"streams.0.arrivals.poisson.rat: unknown key, did you mean 'rate'\?; known keys: rate",
        ),
        (
            "streams: [{num_arrivals: 2, arrivals: {at_once: true}, prompt: 1, output: 1, promt: 1}]",
            r"streams.0.promt: unknown key, did you mean 'prompt'\?",
        ),
        (
            "seed: -1\nstreams: [{num_arrivals: 2, arrivals: {at_once: true}, prompt: 1, output: 1}]",
            "seed: Input should be greater than or equal to 0",
        ),
        (
            "streams: [{num_arrivals: 1, arrivals: {at_once: true}, prompt: 1, output: 1},"
            " {num_arrivals: 1, arrivals: {at_once: true}, prompt: 1, output: 1}]",
            "two streams are called 'request'",
        ),
    ],
)
def test_a_bad_file_is_one_line(text: str, reason: str, tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_workload(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        read_workload(tmp_path / "none.yaml")
