"""Lets these cases import the oracle beside the other tests of samplers, and cuts rows in several blocks."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluglm_samplers.triton.launch.BLOCK", 32)
