"""What the benchmarks' command lines share: numbers that make sense, and records of one form."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from command_line import parser_of, surroundings, whole, write_record

RECORDS = sorted((Path(__file__).parents[1] / "benchmarks" / "records").glob("*.json"))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two", "１.", "1e3"])
def test_what_is_no_whole_number_from_1_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of("What it is.", "some.json")
    parser.add_argument("--rounds", type=whole, default=5)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--rounds={text}"])
    assert f"argument --rounds: {text!r} is no whole number from 1" in capsys.readouterr().err


def test_a_command_line_has_a_place_for_its_record() -> None:
    parser = parser_of("What it is.\n\n    as it is written", "some.json")
    parser.add_argument("--threads", type=whole, nargs="+", default=[1, 2])
    assert parser.parse_args([]) == argparse.Namespace(record=Path("benchmarks/records/some.json"), threads=[1, 2])
    given = parser.parse_args(["--record", "x/y.json", "--threads", "12"])
    assert given == argparse.Namespace(record=Path("x/y.json"), threads=[12])
    assert "\n    as it is written\n" in parser.format_help()


@pytest.mark.parametrize("stored", RECORDS, ids=lambda path: path.stem)
def test_records_have_one_form(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the stored ones, so that a new one differs from them in what was measured alone."""
    path = tmp_path / "new folder" / "record.json"
    write_record(path, json.loads(stored.read_text(encoding="utf-8")))
    assert path.read_bytes() == stored.read_bytes()
    assert capsys.readouterr().out == f"record: {path}\n"


def test_a_record_says_what_it_was_measured_with() -> None:
    found = surroundings()
    assert list(found) == ["torch", "machine"]
    assert found["torch"] == torch.__version__
    assert found["machine"].endswith(f" {platform.python_version()}")
