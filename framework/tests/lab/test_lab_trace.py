"""Trace files: what is written is what is read, token ids are what the documentation says, bad lines are named."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm.kernel.errors import ConfigError
from pluglm.lab.trace import (
    TraceRequest,
    first,
    part_token_ids,
    prompt_token_ids,
    read_trace,
    sped_up,
    trace_digest,
    write_trace,
)

times = st.floats(0, 1e9, allow_nan=False)
requests = st.builds(
    TraceRequest,
    request_id=st.text(min_size=1, max_size=8),
    arrival_s=times,
    prompt=st.lists(st.tuples(st.text(max_size=4), st.integers(1, 10**6)), min_size=1, max_size=3).map(tuple),
    output_tokens=st.integers(1, 10**6),
    tenant=st.text(max_size=4),
    priority=st.integers(-9, 9),
    deadline_s=st.none() | times,
    cancel_s=st.none() | times,
    salt=st.text(max_size=4),
)
traces = st.lists(requests, min_size=1, max_size=5, unique_by=lambda one: one.request_id).map(tuple)


@given(trace=traces)
def test_what_is_written_is_read_again(trace, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, trace)
    again = read_trace(path)
    assert again == trace
    assert trace_digest(again) == trace_digest(trace)
    assert len(path.read_text(encoding="utf-8").splitlines()) >= len(trace)


def test_a_line_holds_only_what_is_not_the_default(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, (TraceRequest(request_id="a", arrival_s=0.5, prompt=(("k", 3),), output_tokens=2),))
    assert path.read_text() == '{"request_id":"a","arrival_s":0.5,"prompt":[["k",3]],"output_tokens":2}\n'


@given(key=st.text(max_size=10), count=st.integers(1, 50), num_ids=st.integers(1, 200_000))
def test_token_ids_are_shake128_of_the_key(key: str, count: int, num_ids: int):
    data = hashlib.shake_128(key.encode()).digest(4 * count)
    expected = [number % num_ids for (number,) in struct.iter_unpack("<I", data)]
    assert part_token_ids(key, count, num_ids) == expected
    assert part_token_ids(key, count + 7, num_ids)[:count] == expected


def test_a_prompt_is_its_parts_in_order():
    parts = (("a", 5), ("b", 3))
    assert prompt_token_ids(parts, 1000) == part_token_ids("a", 5, 1000) + part_token_ids("b", 3, 1000)
    assert part_token_ids("a", 20, 1000) != part_token_ids("b", 20, 1000)


def test_first_and_sped_up():
    trace = (
        TraceRequest(request_id="a", arrival_s=4.0, prompt=(("a", 1),), output_tokens=1, deadline_s=5.0),
        TraceRequest(request_id="b", arrival_s=3.0, prompt=(("b", 1),), output_tokens=1, after="a"),
    )
    assert first(trace, 1) == trace[:1]
    faster = sped_up(trace, 2.0)
    assert [one.arrival_s for one in faster] == [2.0, 3.0]  # a think time is the caller's own
    assert faster[0].deadline_s == 5.0


GOOD = '{"request_id": "a", "arrival_s": 0, "prompt": [["k", 3]], "output_tokens": 2}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "holds no request"),
        ([GOOD, "{"], ":2: not valid JSON"),
        (["[1]"], ":1: must be a JSON object, not list"),
        ([GOOD, "", GOOD], ":3: request_id 'a' is on a line above already"),
        ([GOOD.replace('"output_tokens": 2', '"output_tokens": 0')], ":1: output_tokens: Input should be greater"),
        ([GOOD.replace('["k", 3]', '["k", 0]')], ":1: prompt.0.1: Input should be greater"),
        ([GOOD.replace('[["k", 3]]', "[]")], ":1: prompt: .*at least 1 item"),
        ([GOOD.replace('"a"', '"b", "after": "a"')], ":1: after: 'a' is on no line above"),
        ([GOOD.replace("}", ', "tenent": "x"}')], r":1: tenent: unknown key, did you mean 'tenant'\?"),
        ([GOOD.replace('"arrival_s": 0', '"arrival_s": NaN')], ":1: arrival_s: Input should be a finite number"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], reason: str, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_trace(tmp_path, ())
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read: .*utf-8"):
        read_trace(tmp_path / "latin.jsonl")
