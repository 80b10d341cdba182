"""Public trace formats, on lines written by hand after their descriptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pluglm.kernel.errors import ConfigError
from pluglm.lab.imports import load_trace, read_azure, read_mooncake
from pluglm.lab.trace import prompt_token_ids, write_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.9805900,0,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1030, "output_length": 794, "hash_ids": [0, 1, 3]}
{"timestamp": 3052, "input_length": 600, "output_length": 0, "hash_ids": [0]}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_times_and_lengths(tmp_path: Path):
    trace = read_azure(write(tmp_path / "azure.csv", AZURE))
    assert [one.arrival_s for one in trace] == pytest.approx([0.0, 0.3, 4.314579], abs=1e-6)
    assert [sum(count for _, count in one.prompt) for one in trace] == [374, 1, 396]
    assert [one.output_tokens for one in trace] == [44, 1, 109]
    assert [one.request_id for one in trace] == ["line-2", "line-4", "line-3"]
    assert len({one.prompt[0][0] for one in trace}) == 3


def test_azure_of_2024_has_offsets_and_no_fraction_now_and_then(tmp_path: Path):
    rows = ["2024-05-10 00:00:00.009930+00:00,10,1", "2024-05-10 00:00:01+00:00,10,1", "2024-05-10 02:00:02+02:00,10,1"]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    trace = read_azure(write(tmp_path / "azure.csv", text))
    assert [one.arrival_s for one in trace] == pytest.approx([0.0, 0.99007, 1.99007], abs=1e-6)


def test_mooncake_blocks_are_equal_tokens(tmp_path: Path):
    trace = read_mooncake(write(tmp_path / "mooncake.jsonl", MOONCAKE))
    assert [one.arrival_s for one in trace] == [0.0, 3.052, 3.052]
    assert [one.output_tokens for one in trace] == [500, 794, 1]
    a, b, c = (prompt_token_ids(one.prompt, 50_000) for one in trace)
    assert [len(a), len(b), len(c)] == [1100, 1030, 600]
    assert a[:1024] == b[:1024]
    assert a[1024:1030] != b[1024:1030]
    assert a[:512] == c[:512]
    assert a[512:600] != c[512:600]  # behind the last id the tokens are the request's own


def test_equal_last_blocks_of_other_lengths_begin_alike(tmp_path: Path):
    line = '{"timestamp": 0, "input_length": 655, "output_length": 1, "hash_ids": [46, 47]}'
    text = f"{line}\n{line.replace('655', '672')}"
    a, b = read_mooncake(write(tmp_path / "mooncake.jsonl", text))
    assert prompt_token_ids(a.prompt, 50_000) == prompt_token_ids(b.prompt, 50_000)[:655]


def test_mooncake_with_another_block_size(tmp_path: Path):
    path = write(
        tmp_path / "m.jsonl", '{"timestamp": 5, "input_length": 40, "output_length": 1, "hash_ids": [7, 8, 9]}'
    )
    (one,) = read_mooncake(path, block_tokens=16)
    assert one.prompt == (("block-7", 16), ("block-8", 16), ("block-9", 8))
    assert one.arrival_s == 0.0


def test_the_kind_of_a_file_is_found_out(tmp_path: Path):
    azure = load_trace(write(tmp_path / "a.csv", AZURE))
    mooncake = load_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    write_trace(tmp_path / "ours.jsonl", mooncake)
    assert load_trace(tmp_path / "ours.jsonl") == mooncake
    assert [one.request_id for one in azure] == ["line-2", "line-4", "line-3"]
    with pytest.raises(ConfigError, match=r"must end in .yaml"):
        load_trace(write(tmp_path / "a.txt", AZURE))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "", ":1: column TIMESTAMP is missing"),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", ":1: column GeneratedTokens is missing"),
        ("a.csv", AZURE.splitlines()[0], "holds no request"),
        ("a.csv", AZURE + "yesterday,1,1\n", ":5: TIMESTAMP 'yesterday' is no time"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,1\n", ":5: GeneratedTokens '' is not a whole number"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,-1,1\n", ":5: ContextTokens '-1' is not a whole number"),
        ("m.jsonl", MOONCAKE + '{"input_length": 1}', ":4: timestamp: it is required"),
        (
            "m.jsonl",
            MOONCAKE.replace("[0]", "[0, 1, 2]"),
            ":3: hash_ids: 3 ids for 600 tokens, which are 2 blocks of 512",
        ),
        ("m.jsonl", MOONCAKE.replace("600", "-600"), ":3: input_length: Input should be greater"),
        ("m.jsonl", MOONCAKE + "x", ":4: not valid JSON"),
    ],
)
def test_a_bad_line_is_named(name: str, text: str, reason: str, tmp_path: Path):
    path = write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
