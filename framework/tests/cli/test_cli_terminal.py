"""What a terminal sees, and what it must not: bars on stderr only, and a model's control characters made visible."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from pluglm.cli.output import Output
from pluglm.cli.plugin_list import print_plugins
from pluglm.cli.terminal import new_table, print_on, progress_bars


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Latin(io.StringIO):
    """A stream that cannot say everything."""

    encoding = "latin-1"


def test_bars_are_drawn_on_a_terminal_only():
    for stream, quiet, drawn in ((Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)):
        with progress_bars(stream, quiet) as progress:
            progress("loading", 1, 2)
            progress("loading", 2, 2)
        assert ("2/2" in stream.getvalue()) is drawn


def test_control_characters_of_a_text_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    Output(None).write("a\x1b[31mb\tc\nd\x7f\x9b")
    assert terminal.getvalue() == "a\N{SYMBOL FOR ESCAPE}[31mb\tc\nd\ufffd\ufffd"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    Output(None).write("a\x1b[31mb")
    assert pipe.getvalue() == "a\x1b[31mb"


def test_json_is_ascii_where_stdout_cannot_say_the_rest(monkeypatch: pytest.MonkeyPatch):
    narrow = Latin()
    monkeypatch.setattr(sys, "stdout", narrow)
    Output(None).write_json({"text": "€"})
    Output(None).write("€\n")
    assert narrow.getvalue() == '{"text": "\\u20ac"}\n?\n'


def test_a_table_in_a_pipe_is_neither_folded_nor_padded():
    pipe = io.StringIO()
    table = new_table(None, "a", "b")
    table.add_row("x" * 300, "[bold]literal[/bold] :smile:")
    print_on(pipe, table, "after")
    assert pipe.getvalue().splitlines()[1:] == ["x" * 300 + "  [bold]literal[/bold] :smile:", "", "after"]


@pytest.mark.parametrize(("columns", "classes"), [("80", 0), ("200", 4)])
def test_a_narrow_terminal_gets_no_folded_class_names(monkeypatch: pytest.MonkeyPatch, columns: str, classes: int):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    print_plugins("attention", as_json=False, check=False)
    lines = terminal.getvalue().splitlines()
    assert sum("Attention" in line for line in lines) == classes
    assert len(lines) == 7  # the header, a row each for our four, an empty line and the count


def test_a_file_is_written_in_utf_8(tmp_path: Path):
    with Output(tmp_path / "out.txt") as output:
        output.write_json({"text": "€"})
    assert (tmp_path / "out.txt").read_bytes() == '{"text": "€"}\n'.encode()
