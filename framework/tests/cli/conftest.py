"""Runs the command line in this process, as the installed entry point would."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pluglm.cli.main import main

CONFIGS = Path(__file__).parents[3] / "configs"
FAKE = """
model: {path: smollm2-135m-instruct}
backend: {use: fake}
kv: {use: paged, block_size: 16}
sampler: {use: chain}
sampling: {temperature: 1.0, max_tokens: 6, seed: 7}
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


Command = Callable[..., Outcome]


@pytest.fixture
def pluglm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """pluglm(*arguments, stdin="") -> exit code, stdout, stderr."""

    def run(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pluglm", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def configs() -> Path:
    """The folder of ready configs."""
    return CONFIGS


@pytest.fixture
def fake_config(tmp_path: Path) -> Path:
    """A run of the default model's shape and tokenizer on the fake backend: no weights, deterministic text."""
    path = tmp_path / "fake.yaml"
    path.write_text(FAKE)
    return path


@pytest.fixture
def plugin_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """plugin_package(distribution, entry points, module source): an installed package, as its metadata shows it."""

    def install(distribution: str, points: str, source: str) -> None:
        folder = tmp_path / f"site_{distribution}"
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (folder / f"{distribution}_module.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))

    return install
