"""Exit codes and the one line that goes with each: 0 done, 2 the user's mistake, 1 a component's or our fault."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from pluglm.cli import exits
from pluglm.cli import run as run_module
from pluglm.engine import WORKER_THREAD
from pluglm.kernel.guard import Guard

RAISING_SAMPLER = """
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig

class Raising:
    interface_version = 1
    Config = ComponentConfig
    def __init__(self, config, context): pass
    @classmethod
    def capabilities(cls, config): return Capabilities()
    def check(self, params): return None
    def sample(self, logits_RV, rows): raise ZeroDivisionError("by design")
"""


ENTRY = "from pluglm.cli.main import main; main()"
CLOSED_STREAMS = [
    ("stdout closed", ["--prompt", "x", "--quiet"], ">&-", 2, "standard output is closed; open it, or give --output"),
    ("stderr closed", ["--prompt", "x"], "2>&- >/dev/null", 0, ""),
    ("stderr full", ["--prompt", ""], "2>/dev/full", 2, ""),
    ("stdin closed", [], "<&-", 2, "no prompt; give --prompt TEXT"),
]


@pytest.mark.parametrize("case", CLOSED_STREAMS, ids=lambda case: case[0])
def test_a_closed_or_full_stream_changes_no_exit_code(fake_config: Path, case: tuple[str, list[str], str, int, str]):
    _, arguments, redirection, code, message = case
    command = shlex.join([sys.executable, "-c", ENTRY, "run", str(fake_config), *arguments])
    done = subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, check=False)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "internal error" not in done.stderr


def test_version(pluglm):
    outcome = pluglm("--version")
    assert (outcome.code, outcome.out) == (0, f"pluglm {version('pluglm')}\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "{config}", "--prompt", "x", "--set", "kv.block_sise=4"], "did you mean 'block_size'?"),
        (["run", "{config}", "--prompt", "x", "--set", "attention.use=sdqa"], "did you mean 'sdpa'?"),
        (["run", "{config}", "--prompt", "x", "--set", "novalue"], "write KEY.PATH=VALUE"),
        (["run", "{config}", "--prompt", "x", "--set", "model.path=[1"], "not valid YAML"),
        (["run", "{config}", "--prompt", "x", "--set", "model.path=no-such-model"], "'no-such-model'"),
        (["run", "{config}", "--prompt", "x", "--set", "sampling.max_tokens=99999"], "the context holds"),
        (["run", "{config}", "--prompt", "x", "--set", "grammar=null", "--set", "sampling.grammar.regex=a"], "grammar"),
        (["run", "{config}", "--prompt", "x", "--set", "sampling.logprobs=2"], "add --json"),
        (["run", "{config}.nope", "--prompt", "x"], "cannot be read: No such file"),
        (["run", "{config}", "--prompt", ""], "--prompt is empty"),
        (["run", "{config}"], "standard input is empty"),
        (["run", "{config}", "--prompt", "x", "--prompts-file", "{config}"], "cannot go together"),
        (["run", "{config}", "--prompts-file", "{config}", "--raw"], "--raw is for --prompt"),
        (["run", "{config}", "--prompts-file", "{config}", "--output", "{config}"], "is the prompts file itself"),
        (["run", "{config}", "--prompt", "x", "--output", "{config}/no/where"], "--output"),
        (["run", "{config}", "--prompt", "x", "--output", "{config}"], "is the config file itself"),
        (["config", "check", "{config}", "--expect", "{config}"], "not valid JSON"),
        (["plugins", "list", "--kind", "atention"], "there is no kind 'atention'"),
        (["plugins", "show", "kv", "pagd"], "did you mean 'paged'?"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(pluglm, fake_config: Path, arguments: list[str], expected: str):
    outcome = pluglm(*(one.format(config=fake_config) for one in arguments))
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(outcome.error_lines) == 1
    assert expected in outcome.error_lines[0]
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["run"], ["run", "x", "--no-such-option"], ["nonsense"]])
def test_a_wrong_command_line_is_exit_2_with_usage(pluglm, arguments: list[str]):
    outcome = pluglm(*arguments)
    assert outcome.code == 2
    assert "Usage:" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_component_that_fails_while_running_is_exit_1_by_name(pluglm, fake_config: Path):
    (fake_config.parent / "raising.py").write_text(RAISING_SAMPLER)
    outcome = pluglm("run", fake_config, "--prompt", "x", "--set", "sampler.use=raising.py:Raising")
    assert outcome.code == 1
    assert outcome.error_lines == ["error: --prompt: sampler 'raising.py:Raising' raised ZeroDivisionError: by design"]
    assert "Traceback" not in outcome.err


def test_an_unwritable_output_is_found_before_anything_is_loaded(pluglm, fake_config: Path, monkeypatch):
    monkeypatch.setattr(run_module, "Engine", None)  # loading would end in an internal error
    outcome = pluglm("run", fake_config, "--prompt", "x", "--output", fake_config.parent)
    assert outcome.code == 2
    assert "cannot be written" in outcome.error_lines[0]


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_one_line_with_a_hint_and_a_traceback_only_on_request(pluglm, fake_config, monkeypatch, debug: bool):
    def broken(options: object) -> int:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(run_module, "run_prompts", broken)
    outcome = pluglm(*(["--debug"] if debug else []), "run", fake_config, "--prompt", "x")
    assert outcome.code == 1
    assert "RuntimeError: first line second line" in outcome.error_lines[0]
    assert ("Traceback" in outcome.err) is debug
    assert ("--debug" in outcome.error_lines[0]) is not debug


def test_debug_shows_where_a_users_mistake_was_found(pluglm):
    outcome = pluglm("--debug", "config", "check", "/no/such.yaml")
    assert outcome.code == 2
    assert "Traceback" in outcome.err


@pytest.mark.parametrize("debug", [False, True])
def test_debug_shows_where_a_plugin_raised(pluglm, fake_config: Path, tmp_path: Path, debug: bool):
    source = "from pluglm_samplers.greedy import GreedySampler\nclass Mine(GreedySampler):\n"
    source += (
        "    def check(self, params): return None\n    def sample(self, logits_RV, rows): raise KeyError('lost')\n"
    )
    (fake_config.parent / "my_sampler.py").write_text(source)
    arguments = ["run", str(fake_config), "--prompt", "x", "--set", "sampler=my_sampler:Mine"]
    outcome = pluglm(*(["--debug"] if debug else []), *arguments)
    assert outcome.code == 1
    assert "sampler 'my_sampler:Mine' raised KeyError: 'lost'" in outcome.err
    assert ("my_sampler.py" in outcome.err and "Traceback" in outcome.err) is debug


def _endless(fake_config: Path) -> subprocess.Popen[bytes]:
    code = "from pluglm.cli.main import main; main()"
    arguments = ["run", str(fake_config), "--prompt", "x", "--set", "sampling.max_tokens=8000"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def test_an_interrupt_is_exit_130_in_one_line(fake_config: Path):
    process = _endless(fake_config)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode() == "error: interrupted\n"


def test_an_interrupt_waits_for_the_workers_of_engines_but_not_for_ever(monkeypatch, capsys):
    """One that is cut off within torch as the process ends makes the C++ runtime abort it."""
    release = threading.Event()
    worker = threading.Thread(target=release.wait, name=WORKER_THREAD, daemon=True)
    worker.start()
    threading.Timer(0.2, release.set).start()
    assert exits.interrupted() == 130
    assert not worker.is_alive()
    hanging = threading.Thread(target=(stop := threading.Event()).wait, name=WORKER_THREAD, daemon=True)
    hanging.start()
    monkeypatch.setattr(exits, "PATIENCE_S", 0.1)
    assert exits.interrupted() == 130
    assert hanging.is_alive()
    stop.set()
    assert capsys.readouterr().err == "error: interrupted\n" * 2


def test_workers_have_the_name_that_is_waited_for():
    guard = Guard(5.0)
    assert guard.call("a", lambda: threading.current_thread().name) == WORKER_THREAD == exits.WORKER_THREAD
    guard.close()


def test_a_reader_that_leaves_is_exit_141_without_noise(fake_config: Path):
    process = _endless(fake_config)
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_full_disk_behind_stdout_is_exit_1_in_one_line(fake_config: Path):
    code = "from pluglm.cli.main import main; main()"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, "config", "check", str(fake_config)], stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().startswith("error: ")
    assert "No space left" in ended.stderr.decode()
    assert ended.stderr.count(b"\n") == 1
