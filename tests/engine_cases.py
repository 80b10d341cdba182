"""Helpers of the engine's tests: configs on the fake backend, its documented tokens, and what must hold at rest."""

from __future__ import annotations

import hashlib
import textwrap
from pathlib import Path
from typing import Any

from pluglm import Engine, RunConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def fake_config(path: Path, folder: Path | None = None, /, **slots: Any) -> RunConfig:
    """A run on the fake backend: no weights are read, tokens are a hash of what the KV store gives back."""
    data = {"model": {"path": str(path), "dtype": "float32"}, "backend": "fake", **slots}
    return RunConfig.from_dict(data, folder=folder)


def real_config(path: Path, folder: Path | None = None, /, **slots: Any) -> RunConfig:
    """A run on the reference backend, in its deterministic mode."""
    engine = {"deterministic": True, "num_threads": 1, **slots.pop("engine", {})}
    data = {
        "model": {"path": str(path), "dtype": "float32"},
        "backend": "cpu",
        "attention": "naive",
        "engine": engine,
        **slots,
    }
    return RunConfig.from_dict(data, folder=folder)


def ids(*token_ids: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(token_ids)}


def fake_tokens(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The greedy tokens by the fake backend's docstrings: the first 64-bit number of the BLAKE2b digest, modulo V."""
    known = list(prompt)
    for _ in range(count):
        data = b"".join(t.to_bytes(8, "little") + p.to_bytes(8, "little") for p, t in enumerate(known))
        known.append(int.from_bytes(hashlib.blake2b(data, digest_size=40).digest()[:8], "little") % vocab_size)
    return known[len(prompt) :]


def vocab_size(engine: Engine) -> int:
    size = engine._core.parts.runner.spec.vocab_size
    if size != engine.tokenizer.vocab_size:
        raise AssertionError("the fake tokens assume a head without padding rows")
    return size


def require_idle(engine: Engine) -> None:
    """No request holds anything: seats, KV, text streams, inboxes."""
    core: Any = engine._core
    core.kv.audit()
    left = {
        "held blocks": core.kv.capacity().held_blocks,
        "running": core.roster.running,
        "waiting": core.roster.waiting,
        "requests": core.roster.requests,
        "text streams": core._streams,
        "held back": core.memory.held_back,
        "inboxes": engine._inboxes,
    }
    if any(left.values()):
        raise AssertionError(f"left behind: { {name: value for name, value in left.items() if value} }")


def write_plugin(folder: Path, source: str, name: str = "plugin") -> str:
    """A loose file beside the config; returns the module name to use in `module:Class`."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return name
