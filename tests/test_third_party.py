"""The outside plugin of examples/third_party: installed with pip from a wheel, used by name, held to its contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.assembly.registry import list_entries

EXAMPLE = Path(__file__).parents[1] / "examples/third_party"


@pytest.fixture
def site(install: Callable[..., Path]) -> Path:
    """The folder that the example is installed in. Name, version and entry points are those of its pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = EXAMPLE / "src"
    modules = {
        file.relative_to(source).with_suffix("").as_posix(): file.read_text(encoding="utf-8")
        for file in source.rglob("*.py")
    }
    return install(project["name"], modules, project["entry-points"], version=project["version"])


def engine(model: Path, **scheduler: Any) -> Engine:
    data = {
        "model": {"path": str(model)},
        "backend": "fake",
        "scheduler": {"use": "shortest", **scheduler},
        "engine": {"max_num_seqs": 1},
    }
    return Engine.from_config(RunConfig.from_dict(data))


@pytest.mark.usefixtures("site")
def test_the_engine_uses_it_by_name(tiny_model: Path) -> None:
    """One seat and three requests that are there before the first step: the shorter one starts and ends earlier."""
    entry = next(one for one in list_entries("scheduling_policy") if one.name == "shortest")
    assert (entry.distribution, entry.version) == ("pluglm-shortest", "0.1.0")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engine(tiny_model) as running:
        outputs = running.generate([{"prompt_token_ids": [5] * size} for size in (30, 3, 12)], params)
    ends = [output.metrics.finished_s for output in outputs if output.metrics is not None]
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert ends[1] < ends[2] < ends[0]


@pytest.mark.usefixtures("site")
def test_its_own_key_and_its_refusal(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with engine(tiny_model, queue_limit=2) as running:
        outputs = running.generate([{"prompt_token_ids": [5, 6]}] * 3, params)
    assert [output.finish_reason for output in outputs] == ["length", "length", "refused"]
    assert outputs[2].error is not None
    assert "scheduler 'shortest' refuses it: 2 requests wait already (queue_limit 2)" in outputs[2].error


def test_its_own_tests_pass(site: Path) -> None:
    """As its author runs them: in another process, against the installed copy."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), "tests"]
    done = subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 10, done.stdout
