"""pluglm: a modular LLM inference framework. The names below load lazily, so that listing plugins stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluglm.assembly.run_config import RunConfig
    from pluglm.engine import Engine
    from pluglm.kernel.errors import PluglmError
    from pluglm.outputs import RequestOutput, StreamChunk
    from pluglm.params import SamplingParams

__all__ = ["Engine", "PluglmError", "RequestOutput", "RunConfig", "SamplingParams", "StreamChunk"]

_HOME = {
    "Engine": "pluglm.engine",
    "PluglmError": "pluglm.kernel.errors",
    "RequestOutput": "pluglm.outputs",
    "RunConfig": "pluglm.assembly.run_config",
    "SamplingParams": "pluglm.params",
    "StreamChunk": "pluglm.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pluglm' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
