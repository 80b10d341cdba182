"""Which failures of the native library are remembered: those of the compiler, not those of a starved machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pluglm.native import build, tools
from pluglm.native.build import NativeBuildError, forget, library_path
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


class Starts:
    """Starts of processes that share a cache. Its compiler writes a number as the library; `loads` says which load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.count, self.loads = folder / "count", lambda number: True
        make_compiler(
            monkeypatch, folder, f'for last; do :; done; echo >> {self.count}; wc -l < {self.count} > "$last"'
        )
        monkeypatch.setattr(tools, "load_library", self._load)
        monkeypatch.setattr(tools, "missing", lambda level: None)
        self.cache = folder / "cache"

    def _load(self, path: Path) -> Any:
        number = path.read_text().strip()
        if not number.isdecimal() or not self.loads(int(number)):
            raise NativeBuildError(f"{path} does not load")
        return number

    def start(self) -> str:
        library: Any = tools._load(BASELINE, self.cache)
        return str(library)

    def num_compiled(self) -> int:
        return len(self.count.read_text())

    def damage(self) -> None:
        (library,) = self.cache.glob("*.so")
        library.write_text("damaged")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    return Starts(monkeypatch, tmp_path)


def test_a_library_that_is_damaged_is_built_anew_every_time(starts: Starts) -> None:
    for _ in range(3):
        first, compiled = starts.start(), starts.num_compiled()
        assert starts.start() == first
        assert starts.num_compiled() == compiled
        starts.damage()
        assert starts.start() != first


def test_a_library_that_cannot_load_today_loads_when_it_can(starts: Starts) -> None:
    """The cause may have been memory, or a system library: nothing says that it will be there the next time."""
    starts.loads = lambda number: False
    with pytest.raises(NativeBuildError, match="does not load"):
        starts.start()
    compiled = starts.num_compiled()
    for _ in range(2):
        with pytest.raises(NativeBuildError, match="does not load"):
            starts.start()
    assert starts.num_compiled() == compiled, "it is not built at every start"
    assert not list(starts.cache.glob("*.failed"))
    starts.loads = lambda number: True
    assert starts.start() == str(compiled)
    starts.damage()
    assert int(starts.start()) > compiled


def test_a_library_that_another_process_builds_anew_is_waited_for(starts: Starts) -> None:
    """That one has taken the damaged library away, and this one found it before."""
    starts.start()
    starts.damage()
    (library,) = starts.cache.glob("*.so")
    forget(library)
    assert int(starts.start()) == starts.num_compiled()
