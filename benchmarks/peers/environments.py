"""Makes each peer's environment under the cache folder, once for each state of its pins. Starts no worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from peers.pins import OFFLINE, Entrant

_SECONDS = 3600  # llama-cpp-python is compiled where there is no wheel for the machine
_DONE = "installed.json"
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for one in map(Requirement, requires(sys.argv[1]) or ()):
    if one.name not in sys.argv[2:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        one.marker = None
        print(one)
"""


class UnavailableError(Exception):
    """A peer cannot take part; the text is the reason, one line."""


def python_of(name: str, entrant: Entrant, cache: Path) -> Path:
    """The interpreter that can import the peer; makes its environment if it is missing or was made for other pins.

    Raises UnavailableError with the last line of what failed.
    """
    if not entrant.installs:
        return Path(sys.executable)
    home = home_of(name, cache)
    python, done = home / "bin" / "python", home / _DONE
    pins = json.dumps([entrant.installs, entrant.requirements_of, entrant.without])
    if done.is_file() and done.read_text() == pins:
        return python
    print(f"installing {name} in {home} (once; minutes where it has to be compiled)", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)])
    for arguments in entrant.installs:
        _pip_install(python, list(arguments))
    if entrant.requirements_of is not None:
        names = [entrant.requirements_of, *entrant.without]
        _pip_install(python, _run([str(python), "-c", _REQUIREMENTS, *names]).splitlines())
    done.write_text(pins)
    return python


def home_of(name: str, cache: Path) -> Path:
    return cache / "environments" / name


def variables_of(name: str, entrant: Entrant, cache: Path, threads: int) -> dict[str, str]:
    """Environment variables of its worker: this process's, offline, with its threads; `peers` can be imported."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:threads])
    filled = {
        key: value.format(threads=threads, cpus=cpus, home=home_of(name, cache), cache=cache)
        for key, value in entrant.variables.items()
    }
    folder = str(Path(__file__).parents[1])
    return {**os.environ, **OFFLINE, "PYTHONPATH": folder, "OMP_NUM_THREADS": str(threads), **filled}


def versions_in(python: Path) -> dict[str, str]:
    """Every distribution of an environment and its version, for the record."""
    listed = json.loads(_run([str(python), "-m", "pip", "list", "--format=json"]))
    return {one["name"]: one["version"] for one in listed}


def _pip_install(python: Path, arguments: list[str]) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> str:
    """Its standard output. Raises UnavailableError when it fails."""
    shown = " ".join(command[1:5])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{shown}: {error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise UnavailableError(f"{shown} ...: {lines[-1]}")
    return done.stdout
