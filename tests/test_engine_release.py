"""What a closed engine still holds of memory: nothing that counts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from engine_cases import GREEDY, ids, real_config

from pluglm import Engine
from pluglm.kernel.errors import RequestError


def test_close_lets_go_of_weights_and_kv(tiny_model: Path) -> None:
    """At once, while the engine is still held, and without the collector of cycles."""
    engine = Engine.from_config(real_config(tiny_model, attention="paged"))
    engine.generate([ids(1, 2, 3)], GREEDY)
    runner = engine.core.parts.runner
    held = [weakref.ref(runner.model), weakref.ref(runner.store)]
    del runner
    gc.disable()
    try:
        engine.close()
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
    with pytest.raises(RequestError, match="closed"):
        engine.submit(ids(1))
