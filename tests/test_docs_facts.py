"""What the documentation states about files, keys and dependencies is so. Commands are test_docs_commands.py's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from pluglm.assembly.registry import KINDS, list_entries, load
from pluglm.assembly.resolving import SLOTS
from pluglm.assembly.run_config import EngineConfig, ModelConfig, RunConfig
from pluglm.kernel.config import Slot
from pluglm.params import SamplingParams

ROOT = Path(__file__).parents[1]
FRAMEWORK = ROOT / "framework/src/pluglm"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MEMBERS = [ROOT / "framework", *sorted(file.parent for file in (ROOT / "plugins").glob("*/pyproject.toml"))]
EXAMPLE_NAMES = {"my_file.py", "file.py", "name.py", "FILE.gguf"}  # stand for files of the reader


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def table(name: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = text_of(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose(document))
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """Relative to the repository, to the framework's package, or to the folder of tests."""
    spans = re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|toml|jsonl|txt)|/))`", prose(document))
    homes = (ROOT, FRAMEWORK, FRAMEWORK.parent)
    missing = [span for span in spans if not any((home / span).exists() for home in homes)]
    assert not [span for span in missing if span not in EXAMPLE_NAMES and span != "pyproject.toml"]


def test_the_tree_of_the_readme_is_the_repository() -> None:
    section = text_of("README.md").partition("## Where things are")[2].partition("```text\n")[2].partition("```")[0]
    above: list[tuple[int, Path]] = [(-1, ROOT)]
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        above = [one for one in above if one[0] < indent]
        folder = above[-1][1] / line.split()[0]
        assert folder.is_dir(), line
        above.append((indent, folder))
    shown = set(re.findall(r"([\w.]+)/  ", section))
    kernel_folders = {path.name for path in FRAMEWORK.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert kernel_folders <= shown
    assert {path.name for path in MEMBERS[1:]} <= shown


def default_of(model: type[BaseModel], name: str) -> Any:
    field = model.model_fields[name]
    value = "required" if field.is_required() else field.get_default(call_default_factory=True)
    value = value.use if isinstance(value, Slot) and not value.options else value
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("heading", "model"), [("`model`", ModelConfig), ("`engine`", EngineConfig), ("`sampling`", SamplingParams)]
)
def test_every_key_and_default_of_a_section(heading: str, model: type[BaseModel]) -> None:
    stated = {row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in table("docs/config.md", heading)}
    assert stated == {name: default_of(model, name) for name in model.model_fields}


def test_every_slot_its_default_and_our_components() -> None:
    for slot, default, installed in table("docs/config.md", "Slots"):
        kinds = SLOTS[slot.strip("`")]
        chosen = getattr(RunConfig(), slot.strip("`"))
        assert default.strip("`") == ("null" if chosen is None else chosen.use)
        ours = {entry.name for kind in kinds for entry in list_entries(kind) if entry.target.startswith("pluglm")}
        named = set(re.findall(r"`(\w+)`", installed)) - {"auto"}
        assert named == ours
    assert {row[0].strip("`") for row in table("docs/config.md", "Slots")} == set(SLOTS)


def test_every_key_of_our_components() -> None:
    stated: dict[tuple[str, str, str], Any] = {}
    for component, key, default, _ in table("docs/config.md", "Keys of the components"):
        kind, name = component.strip("`").split()
        stated[kind, name, key.strip("`")] = yaml.safe_load(default.strip("`"))
    steps = stated.pop(("sampler", "chain", "steps"))
    known: dict[tuple[str, str, str], Any] = {}
    for entry in list_entries():
        if entry.kind != "model" and entry.target.startswith("pluglm"):
            config = load(entry).Config
            known |= {(entry.kind, entry.name, key): default_of(config, key) for key in config.model_fields}
    assert steps == "those of the preset"
    del known["sampler", "chain", "steps"]  # docs/sampling.md has them
    assert stated == known


def test_the_contract_table_names_every_kind() -> None:
    rows = table("docs/architecture.md", "The contracts")
    assert [row[0].strip("`") for row in rows] == list(dict.fromkeys(row[0].strip("`") for row in rows))
    assert {row[0].strip("`") for row in rows} == set(KINDS)
    for _, contract, kit in rows:
        assert (FRAMEWORK / contract.strip("`")).is_file()
        assert "_checks(" in (FRAMEWORK / kit.strip("`")).read_text(encoding="utf-8")


def declared_dependencies() -> set[str]:
    """Names in every pyproject.toml, requirements-dev.txt and the Makefile."""
    found: list[str] = []
    for member in MEMBERS:
        data = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))
        found += [*data["project"]["dependencies"], *data["build-system"]["requires"]]
    lines = (line.partition("  #")[0].strip() for line in text_of("requirements-dev.txt").splitlines())
    found += [line for line in lines if line and not line.startswith(("-e", "#"))]
    makefile = text_of("Makefile")
    found += re.findall(r"([\w-]+)==[\d.]+", makefile)
    parts = re.search(r"foreach part,([\d ]+)\s*,([\w-]+)\$\(part\)", makefile)
    found += [f"{parts[2]}{number}" for number in parts[1].split()] if parts else []
    return {canonicalize_name(Requirement(one).name) for one in found}


def test_every_dependency_has_a_reason() -> None:
    headings = ("Runtime", "Models", "Build", "Development")
    rows = [row for heading in headings for row in table("docs/dependencies.md", heading)]
    assert {canonicalize_name(row[0]) for row in rows} == declared_dependencies() - {"pluglm-workspace"}
    assert len({row[0] for row in rows}) == len(rows)
    assert all(len(row) == 5 and all(row) for row in rows)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_dependencies_say_who_needs_them(member: Path) -> None:
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    who = project["name"].removeprefix("pluglm-") if member.parent.name == "plugins" else "framework"
    needed = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]} - {"pluglm"}
    stated = {
        canonicalize_name(row[0]) for row in table("docs/dependencies.md", "Runtime") if who in row[1].split(", ")
    }
    assert stated == needed


def test_decisions_are_numbered_and_complete() -> None:
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {int(path.name[:4])}. ")
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]
