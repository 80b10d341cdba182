"""A machine without a compiler, with an old CPU or one core still runs, with the tokens of torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, ids

from pluglm import Engine, RunConfig
from pluglm.kernel.errors import PluginError
from pluglm.native import build, isa, threads
from pluglm.native.build import library_path
from pluglm.native.isa import LEVELS
from pluglm.native.tools import NativeTools

PROMPTS = [ids(5, 6, 7, 8, 9), ids(11, 12), ids(*range(20, 60))]


def config(model: Path, dtype: str, **backend: Any) -> RunConfig:
    data = {
        "model": {"path": str(model), "dtype": dtype},
        "backend": {"use": "cpu", **backend},
        "attention": "naive",
        "engine": {"kv_memory": 1 << 22},
    }
    return RunConfig.from_dict(data)


def run(model: Path, dtype: str = "float32", **backend: Any) -> tuple[list[list[int]], dict[str, tuple[str, str]]]:
    """Greedy tokens of each prompt, and of each operation its kernel and why no other."""
    with Engine.from_config(config(model, dtype, **backend)) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)
        kernels = {
            one.operation: (one.kernel, "; ".join(reason for _, reason in one.refused)) for one in engine.kernels
        }
        return [list(output.token_ids) for output in outputs], kernels


@pytest.fixture(scope="module")
def torch_tokens(tiny_model: Path) -> list[list[int]]:
    tokens, kernels = run(tiny_model, kernels="torch")
    assert "the config says kernels: torch" in kernels["linear"][1]
    return tokens


def no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("PATH", str(folder))


def broken_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """It says a version, and fails to compile."""
    script = folder / "c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\necho "x.cpp:1: error: no" >&2\nexit 1\n')
    script.chmod(0o755)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    patch.setattr("pluglm.native.tools.default_cache", lambda: folder / "cache")


def unwritable_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A file stands where the folder would be made; permissions do not stop root."""
    (folder / "taken").write_text("")
    patch.setattr("pluglm.native.tools.default_cache", lambda: folder / "taken/native")


def library_of_another_machine(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """What the cache holds is no library of this system."""
    (folder / "foreign.so").write_bytes(b"not a library")
    patch.setattr("pluglm.native.tools.library_path", lambda level, cache: folder / "foreign.so")


OBSTACLES = {
    no_compiler: "no C++ compiler was found",
    broken_compiler: "c++ failed",
    unwritable_cache: "cannot be written",
    library_of_another_machine: "does not load",
}


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda one: one.__name__)
def test_without_the_library_torch_computes_the_same_tokens(
    obstacle: Callable[..., None],
    tiny_model: Path,
    torch_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    obstacle(monkeypatch, tmp_path)
    tokens, kernels = run(tiny_model)
    assert tokens == torch_tokens
    assert not kernels["linear"][0].startswith("native")
    assert OBSTACLES[obstacle] in kernels["linear"][1]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda one: one.__name__)
def test_who_insists_on_native_kernels_is_told_why_there_are_none(
    obstacle: Callable[..., None], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    obstacle(monkeypatch, tmp_path)
    with pytest.raises(PluginError) as caught:
        Engine.from_config(config(tiny_model, "float32", kernels="native"))
    assert OBSTACLES[obstacle] in str(caught.value)
    assert "set backend.kernels: auto or torch" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_build_is_not_tried_again_until_its_note_is_gone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken_compiler(monkeypatch, tmp_path)
    calls = tmp_path / "calls"
    script = tmp_path / "c++"
    script.write_text(
        script.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\n[ "$1" = --version ] || echo >> {calls}\n')
    )
    first = run(tiny_model)[1]["linear"][1]
    num_calls = len(calls.read_text())
    assert num_calls > 0
    assert f"c++ failed: x.cpp:1: error: no; to try again, delete *.failed in {tmp_path / 'cache'}" in first
    assert run(tiny_model)[1]["linear"][1] == first
    assert len(calls.read_text()) == num_calls
    for note in (tmp_path / "cache").glob("*.failed"):
        note.unlink()
    run(tiny_model)
    assert len(calls.read_text()) > num_calls
    script.write_text(script.read_text().replace("echo 1.0", "echo 1.1"))  # another compiler
    num_calls = len(calls.read_text())
    run(tiny_model)
    assert len(calls.read_text()) > num_calls


def test_float16_has_no_native_kernels(tiny_model: Path) -> None:
    tokens, kernels = run(tiny_model, "float16")
    assert kernels["linear"][0] == "torch"
    assert "there are none for float16" in kernels["linear"][1]
    assert tokens == run(tiny_model, "float16", kernels="torch")[0]
    with pytest.raises(PluginError, match="there are none for float16"):
        Engine.from_config(config(tiny_model, "float16", kernels="native"))


@pytest.fixture(scope="module")
def has_compiler() -> None:
    try:
        build.find_compiler()
    except build.NativeBuildError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("has_compiler")
def test_native_kernels_give_the_same_greedy_tokens(tiny_model: Path, torch_tokens: list[list[int]]) -> None:
    tokens, kernels = run(tiny_model, kernels="native")
    assert tokens == torch_tokens
    computing = {name: kernel for name, (kernel, _) in kernels.items() if name != "planning"}
    assert {kernel.partition(" ")[0] for kernel in computing.values() if kernel != "torch"} == {"native"}
    assert {"linear", "decoder layer", "head"} <= set(kernels)


@pytest.mark.usefixtures("has_compiler")
def test_an_old_cpu_runs_the_baseline_level(
    tiny_model: Path, torch_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda root: frozenset({"sse2"}))
    tokens, kernels = run(tiny_model)
    assert tokens == torch_tokens
    kernel, reasons = kernels["linear"]
    assert kernel == "native (baseline)"
    assert "the CPU lacks avx2" in reasons or "the CPU is" in reasons
    with pytest.raises(PluginError, match=r"the CPU lacks avx2|the CPU is"):
        Engine.from_config(config(tiny_model, "float32", kernels="native", isa="avx2"))


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("spin_us", [0, 50])
def test_one_core_means_one_thread(
    spin_us: int, tiny_model: Path, torch_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: {0}, raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 1)
    with Engine.from_config(config(tiny_model, "float32", spin_us=spin_us)) as engine:
        tools: Any = engine.core.parts.runner.backend.tools  # type: ignore[attr-defined]
        assert (tools.num_threads, tools.spin_us) == (1, spin_us)
        assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == torch_tokens


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("contents", [b"", b"not a library"])
def test_a_library_that_does_not_load_is_built_anew(contents: bytes, tmp_path: Path) -> None:
    library = library_path(LEVELS[-1], tmp_path)
    library.write_bytes(contents)
    NativeTools(1, "baseline", cache=tmp_path).close()
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert not list(tmp_path.glob("*.failed"))


@pytest.mark.usefixtures("has_compiler")
def test_what_does_not_load_when_it_is_new_is_built_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds: list[Path] = []

    def build_nothing(compiler: str, level: Any, target: Path) -> None:
        builds.append(target)
        target.write_bytes(b"not a library")

    monkeypatch.setattr(build, "_compile", build_nothing)
    for _ in range(2):
        with pytest.raises(build.NativeBuildError, match=r"does not load: .*; to have it built once more, delete it"):
            NativeTools(1, "baseline", cache=tmp_path)
    assert len(builds) == 2  # the first, and the one that was to mend it


@pytest.mark.usefixtures("has_compiler")
def test_what_lies_in_huge_pages_already_is_not_copied() -> None:
    tools = NativeTools(1, "baseline")
    placed = tools.placed(torch.ones(1 << 18))
    assert tools.placed(placed) is placed
    assert tools.placed(placed.view(512, 512)).data_ptr() == placed.data_ptr()
    tools.close()


@pytest.mark.usefixtures("has_compiler")
def test_threads_that_never_had_work_end_with_their_pool() -> None:
    """Opened and closed at once, many times: the pool once missed a wake-up here and waited for ever."""
    for spin_us in (0, 1, 50) * 30:
        NativeTools(4, "baseline", spin_us).close()
