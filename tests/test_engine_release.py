"""What a closed engine still holds of memory: nothing that counts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, ids, real_config

from pluglm import Engine
from pluglm.kernel.errors import RequestError


@pytest.mark.parametrize("drafter", [None, {"use": "self_layers", "num_layers": 1}])
def test_close_lets_go_of_weights_and_kv(tiny_model: Path, drafter: dict[str, Any] | None) -> None:
    """At once, while the engine is still held, and without the collector of cycles; of what a drafter was lent too."""
    engine = Engine.from_config(real_config(tiny_model, attention="paged", drafter=drafter))
    engine.generate([ids(1, 2, 3)], GREEDY)
    runner = engine.core.parts.runner
    model: Any = runner.model
    held = [weakref.ref(one) for one in (model, runner.store, model._embedding_VD)]
    del runner, model
    gc.disable()
    try:
        engine.close()
        assert [one() for one in held] == [None, None, None]
    finally:
        gc.enable()
    with pytest.raises(RequestError, match="closed"):
        engine.submit(ids(1))
