"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config
from fault_cases import Case, faulty

from pluglm import Engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def case(tiny_model: Path, folder: Path) -> Iterator[Any]:
    engines: list[Engine] = []

    def make(slot: str, body: str, timeout_s: float = 30.0, **slots: Any) -> Case:
        use = faulty(folder, slot, body)
        filled = {("scheduler" if slot == "policy" else slot): use, **slots}
        filled["engine"] = {"plugin_timeout_s": timeout_s, **slots.get("engine", {})}
        engines.append(Engine.from_config(fake_config(tiny_model, folder, **filled)))
        return Case(engines[-1])

    yield make
    for engine in engines:
        engine.close()
