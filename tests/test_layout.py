"""The house's limits on files, functions, names and imports, and that the public names are what they claim to be."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pluglm.assembly import registry

ROOT = Path(__file__).parents[1]
MEMBERS = [
    ROOT / "framework",
    *sorted(path for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").is_file()),
]
SOURCES = sorted(file for member in MEMBERS for file in (member / "src").rglob("*.py"))
TESTS = sorted(file for root in (*MEMBERS, ROOT) for file in (root / "tests").rglob("*.py"))
KINDS = tuple(kind for kind in registry.KINDS if kind != "scheduler" or registry.list_entries("scheduler"))


def function_lengths(file: Path) -> dict[str, int]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        f"{file.name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_files_are_small() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (*SOURCES, *TESTS)}
    assert not {str(file.relative_to(ROOT)): length for file, length in lengths.items() if length > 400}
    assert statistics.median(lengths[file] for file in SOURCES) <= 120


def test_functions_are_short() -> None:
    lengths = {name: length for file in SOURCES for name, length in function_lengths(file).items()}
    assert not {name: length for name, length in lengths.items() if length > 60}
    assert statistics.median(lengths.values()) <= 10
    assert statistics.quantiles(lengths.values(), n=10)[-1] < 35


def test_test_files_have_unique_names() -> None:
    counts = Counter(file.name for file in TESTS if file.name != "conftest.py")
    assert not {name: count for name, count in counts.items() if count > 1}


def test_every_module_says_what_it_knows() -> None:
    silent = [str(file.relative_to(ROOT)) for file in SOURCES if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not silent


def test_no_assert_guards_a_caller() -> None:
    """`python -O` removes them."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_kernel_is_within_its_budget() -> None:
    subprocess.run([sys.executable, str(ROOT / "tests/kernel_budget.py")], check=True)


def test_public_names_are_those_exported() -> None:
    pluglm = importlib.import_module("pluglm")
    assert sorted(pluglm.__all__) == [
        "Engine",
        "PluglmError",
        "RequestOutput",
        "RunConfig",
        "SamplingParams",
        "StreamChunk",
    ]
    for name in pluglm.__all__:
        assert getattr(pluglm, name).__name__ == name
        assert getattr(pluglm, name).__doc__
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = pluglm.nothing_like_this


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_point_of_ours_loads(kind: str) -> None:
    points = [point for point in entry_points(group=f"pluglm.{kind}") if point.value.startswith("pluglm")]
    assert points
    for point in points:
        assert isinstance(point.load(), type)


def test_members_are_typed() -> None:
    for member in MEMBERS:
        packages = [path for path in (member / "src").iterdir() if path.is_dir()]
        assert all((package / "py.typed").is_file() for package in packages)
