"""Reading a JSONL file of prompts: what each kind of bad line is told, and that none is told as a crash."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pluglm.cli.jobs import BadLinesError, read_jobs
from pluglm.kernel.errors import ConfigError, PluglmError
from pluglm.params import SamplingParams

SAMPLING = SamplingParams(temperature=0.5, seed=3)


def _read(tmp_path: Path, content: bytes):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    return read_jobs(file, SAMPLING)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "x"', "not valid JSON"),
        (b'["prompt"]', "must be a JSON object"),
        (b"{}", "not none"),
        (b'{"prompt": "x", "messages": []}', "not prompt and messages"),
        (b'{"prompt": null}', "prompt must be a string, not NoneType"),
        (b'{"prompt": "x", "extra": 1}', "unknown key 'extra'"),
        (b'{"prompt": "x", "prompt": "y"}', "key 'prompt' is given twice"),
        (b'{"prompt": "\xff"}', "not UTF-8 text: byte 13 is 0xff"),
        (b'{"prompt": "x", "params": {"temperature": NaN}}', "NaN is not JSON"),
        (b'{"prompt": "x", "params": {"temprature": 1}}', "did you mean 'temperature'?"),
        (b'{"prompt": "x", "params": {"top_p": 2}}', "params.top_p"),
        (b'{"prompt": "x", "params": []}', "params must be an object"),
        (b'{"prompt": "x", "id": true}', "id must be a string or an integer"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content is a int"),
        (b'{"prompt_token_ids": []}', "at least one integer"),
        (b'{"prompt_token_ids": [1, true]}', "at least one integer"),
        (b'{"prompt_token_ids": [-1]}', "none below 0"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_line_is_told_by_file_and_number(tmp_path: Path, line: bytes, expected: str):
    with pytest.raises(BadLinesError) as caught:
        _read(tmp_path, b'{"prompt": "fine"}\n\n' + line + b"\n")
    (told,) = caught.value.lines
    assert told.startswith(f"{tmp_path / 'prompts.jsonl'}:3: ")
    assert expected in told
    assert "\n" not in told


def test_a_file_without_prompts_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no prompt"):
        _read(tmp_path, b"\n \n")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path):
    jobs = _read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [job.prompt for job in jobs] == ["a", "b"]


def test_params_go_over_those_of_the_config(tmp_path: Path):
    (job,) = _read(tmp_path, b'{"prompt": "a", "params": {"top_k": 4, "stop": "END"}}')
    assert job.params == SamplingParams(temperature=0.5, seed=3, top_k=4, stop=("END",))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(), min_size=1, max_size=8))
def test_any_texts_are_read_back_in_order(tmp_path: Path, texts: list[str]):
    content = "\n".join(json.dumps({"prompt": text}) for text in texts).encode("utf-8", "surrogatepass")
    assert [job.prompt for job in _read(tmp_path, content)] == texts


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.recursive(st.none() | st.text(max_size=5) | st.integers() | st.booleans(),
       lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
           ["prompt", "messages", "prompt_token_ids", "params", "id", "role", "content", "temperature", "grammar"]),
           inner, max_size=3), max_leaves=8).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_bytes_end_in_anything_but_our_errors(tmp_path: Path, content: bytes):
    with contextlib.suppress(PluglmError):
        assert _read(tmp_path, content)


def test_an_id_that_no_encoding_holds_does_not_end_the_run(pluglm, fake_config: Path, tmp_path: Path):
    """JSON may spell a lone surrogate, which UTF-8 has no bytes for."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "a", "id": "x\\ud800"}\n{"prompt": "b", "id": "y"}\n')
    outcome = pluglm("run", fake_config, "--prompts-file", prompts, "--output", output, "--quiet")
    assert outcome.code == 0, outcome.err
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["x?", "y"]
