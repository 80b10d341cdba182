"""A small engine on the fake backend with prices whose sums are exact in binary, and traces written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pluglm import RunConfig
from pluglm.lab.trace import TraceRequest

PRICES = {"step_base_s": 1.0, "token_s": 0.25, "row_s": 0.0625, "chunk_s": 0.5, "context_s": 2.0**-10}


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """make_config(backend=..., kv=..., scheduler=..., **engine): PRICES on 64 blocks of 16, unless told otherwise."""

    def make(
        backend: dict[str, Any] | None = None, kv: Any = None, scheduler: Any = "fcfs", **engine: Any
    ) -> RunConfig:
        return RunConfig.from_dict(
            {
                "backend": {"use": "fake", **PRICES, **(backend or {})},
                "kv": kv or {"use": "paged", "block_size": 16, "num_blocks": 64},
                "scheduler": scheduler,
                "engine": {"max_num_seqs": 4, "max_step_tokens": 64, **engine},
            }
        )

    return make


@pytest.fixture
def ask() -> Callable[..., TraceRequest]:
    """ask(name, num_prompt, num_output, at=0.0, **fields): one request of a trace, its prompt shared with nobody."""

    def make(name: str, num_prompt: int, num_output: int, at: float = 0.0, **fields: Any) -> TraceRequest:
        prompt = fields.pop("prompt", ((name, num_prompt),))
        return TraceRequest(request_id=name, arrival_s=at, prompt=prompt, output_tokens=num_output, **fields)

    return make
