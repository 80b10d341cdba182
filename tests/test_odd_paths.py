"""Paths and texts that no file system or no UTF-8 has: one line that names the key, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engine_cases import GREEDY, fake_config, ids

from pluglm import Engine, PluglmError, RunConfig
from pluglm.kv.sealed import write_whole

LONE = "\ud800"  # a surrogate without its partner


def test_a_config_with_a_lone_surrogate_is_refused_in_one_line() -> None:
    with pytest.raises(PluglmError, match="holds a lone surrogate") as raised:
        RunConfig.from_dict({"model": {"path": f"model{LONE}"}})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("hook", ["missing/events.jsonl", "nul\0events.jsonl"])
def test_an_events_file_that_cannot_be_is_refused_by_its_path(tmp_path: Path, tiny_model: Path, hook: str) -> None:
    config = fake_config(tiny_model, hooks=[{"use": "events", "path": str(tmp_path / hook)}])
    with pytest.raises(PluglmError, match=r"events: .* cannot be written"):
        Engine.from_config(config)


def test_a_request_id_with_a_lone_surrogate_is_logged_as_its_escape(tmp_path: Path, tiny_model: Path) -> None:
    log = tmp_path / "events.jsonl"
    with Engine.from_config(fake_config(tiny_model, hooks=[{"use": "events", "path": str(log)}])) as engine:
        engine.submit(ids(1, 2), GREEDY, request_id=f"odd{LONE}")
        list(engine.events(f"odd{LONE}"))
    names = {line.get("request_id") for line in map(json.loads, log.read_text(encoding="utf-8").splitlines())}
    assert f"odd{LONE}" in names


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_kv_is_never_written_over_what_is_no_file(tmp_path: Path, make: object) -> None:
    target = tmp_path / "kv.safetensors"
    make(target)  # type: ignore[operator]
    with pytest.raises(FileExistsError, match="it is there and is no file"):
        write_whole(target, b"kv")
    assert not target.is_file()
