"""Which failed builds of the native library are remembered: those of the compiler, not those of a starved machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pluglm.native import build
from pluglm.native.build import NativeBuildError, library_path
from pluglm.native.isa import LEVELS

BASELINE = LEVELS[-1]
# What the compiler does -> what the error says. The texts are those of GCC, GNU ld and Clang.
CUT_SHORT = {
    "kill -9 $$": "was ended by signal 9",
    "sleep 30": "took longer than 0.5 s",
    "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1": "Killed signal terminated",
    "echo 'clang++: error: unable to execute command: Killed' >&2; exit 254": "unable to execute command: Killed",
    "echo 'cc1plus: out of memory allocating 65536 bytes' >&2; exit 1": "out of memory allocating",
    "echo 'fatal error: error writing to /x.s: No space left on device' >&2; exit 1": "No space left on device",
}


def make_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, action: str) -> None:
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo 1.0; exit; }}\n{action}\n')
    script.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(script))


@pytest.mark.parametrize("action", CUT_SHORT)
def test_a_build_that_was_cut_short_is_tried_again(
    action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.5)
    make_compiler(monkeypatch, tmp_path, f"exec {action}" if action.startswith("sleep") else action)
    with pytest.raises(NativeBuildError, match=CUT_SHORT[action]) as caught:
        library_path(BASELINE, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.failed"))
    make_compiler(monkeypatch, tmp_path, 'for last; do :; done; echo built > "$last"')  # -o FILE comes last
    assert library_path(BASELINE, tmp_path).read_text() == "built\n"


def test_a_source_that_does_not_compile_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_compiler(monkeypatch, tmp_path, "echo 'x.cpp:1: error: no such type' >&2; exit 1")
    with pytest.raises(NativeBuildError, match="no such type") as first:
        library_path(BASELINE, tmp_path)
    monkeypatch.setattr(build, "_compile", lambda *arguments: pytest.fail("it was tried again"))
    with pytest.raises(NativeBuildError) as again:
        library_path(BASELINE, tmp_path)
    assert str(again.value) == str(first.value)
    assert len(list(tmp_path.glob("*.failed"))) == 1


def test_a_compiler_may_speak_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_compiler(monkeypatch, tmp_path, r"printf 'x.cpp:1: error: \377\n' >&2; exit 1")
    with pytest.raises(NativeBuildError, match="error: \N{REPLACEMENT CHARACTER}"):
        library_path(BASELINE, tmp_path)
