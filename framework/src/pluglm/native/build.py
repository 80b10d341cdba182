"""Builds the shared library of one instruction level, once a machine: cached by sources, compiler and options."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pluglm.native.isa import Level
from pluglm.native.threads import usable_cores

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-O3", "-std=c++20", "-fPIC", "-pthread", "-w")
_TIMEOUT_S = 300
# What compilers and linkers say when the system took from them what they needed, not when a source is wrong.
_CUT_SHORT = (
    "Killed",
    "No space left on device",
    "Disk quota exceeded",
    "out of memory",
    "memory exhausted",
    "Cannot allocate memory",
)


class NativeBuildError(Exception):
    """The library could not be had; the message is one line and says why."""


class BuildCutShort(NativeBuildError):  # noqa: N818 - named for what happened
    """A build ended for want of time, memory or room, so the next start may succeed: it is not remembered."""


def find_compiler() -> str:
    """The path of a C++ compiler. NativeBuildError when there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeBuildError(f"no C++ compiler was found ({', '.join(COMPILERS)})")


def default_cache() -> Path:
    """Where built libraries are kept: the user's cache folder. NativeBuildError for a user without a home."""
    try:
        return Path.home() / ".cache/pluglm/native"
    except RuntimeError as error:
        raise NativeBuildError(f"the user has no home folder to keep the built library in: {error}") from error


def library_path(level: Level, cache: Path) -> Path:
    """The library of `level`, built when the cache lacks it. NativeBuildError says what stands in the way.

    A build that failed is not tried again before sources, compiler or options change, or its note in the cache is gone;
    one that was cut short is, at the next start.
    """
    compiler = find_compiler()
    target = cache / f"{level.name}-{_digest(level, compiler)}.so"
    try:
        _raise_remembered(target)
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(cache / f"{target.stem}.lock"):
                _raise_remembered(target)
                if not target.exists():
                    _compile_once(compiler, level, target)
    except OSError as error:
        raise NativeBuildError(f"{cache} cannot be written: {error.strerror or error}") from error
    return target


def forget(library: Path) -> None:
    """Takes a library that does not load out of the cache: it may be damaged, or built for a system that has changed.

    Once only: what keeps one from loading that was built anew is not the library, so it stays for when that has gone.
    """
    with contextlib.suppress(OSError):
        if not _mark(library).exists():
            _mark(library).touch()
            library.unlink()


def keep(library: Path) -> None:
    """It loads. If it does not one day, it will be forgotten again."""
    with contextlib.suppress(OSError):
        _mark(library).unlink(missing_ok=True)


def _mark(library: Path) -> Path:
    """There when the library did not load and was built anew: it is not built a third time."""
    return library.with_suffix(".rebuilt")


def _remember_failure(library: Path, reason: str) -> NativeBuildError:
    """The error to raise, now and at the next starts, instead of building `library` again."""
    with contextlib.suppress(OSError):
        _note(library).write_text(reason, encoding="utf-8")
    return _failure(library, reason)


def _raise_remembered(library: Path) -> None:
    """NativeBuildError, as it was, for a library whose build failed."""
    with contextlib.suppress(FileNotFoundError):
        raise _failure(library, _note(library).read_text(encoding="utf-8", errors="replace"))


def _note(library: Path) -> Path:
    return library.with_suffix(".failed")


def _failure(library: Path, reason: str) -> NativeBuildError:
    return NativeBuildError(f"{reason}; to try again, delete *.failed in {library.parent}")


def _digest(level: Level, compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*_OPTIONS, *level.options, platform.machine(), compiler, _version(compiler))).encode())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        command = [compiler, "--version"]  # what it says may be in any encoding
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=True)
        return done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeBuildError(f"{compiler} does not run: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Several processes that start at once build one after another; the system frees the lock of one that dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_once(compiler: str, level: Level, target: Path) -> None:
    try:
        _compile(compiler, level, target)
    except BuildCutShort:
        raise
    except NativeBuildError as error:
        raise _remember_failure(target, str(error)) from error


def _compile(compiler: str, level: Level, target: Path) -> None:
    """All sources side by side, as many at once as there are cores, then linked; the target appears whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(usable_cores()) as workers:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        options = [compiler, *_OPTIONS, *level.options]
        commands = [[*options, "-c", str(one), "-o", made] for one, made in zip(sources, objects, strict=True)]
        for _ in workers.map(_run, commands):
            pass
        _run([*options, "-shared", *objects, "-o", f"{folder}/whole.so"])
        Path(folder, "whole.so").replace(target)


def _run(command: Sequence[str]) -> None:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildCutShort(f"{name} took longer than {_TIMEOUT_S} s") from None
    if done.returncode < 0:
        raise BuildCutShort(f"{name} was ended by signal {-done.returncode}")
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        error = BuildCutShort if any(sign in done.stderr for sign in _CUT_SHORT) else NativeBuildError
        raise error(f"{name} failed: {' '.join(said.split())}")
