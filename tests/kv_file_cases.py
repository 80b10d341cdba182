"""Helpers of the tests of saved KV: configs with a prefix cache, and a run that shows what a file made of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_cases import GREEDY, fake_config, ids, require_idle

from pluglm import Engine, RequestOutput, RunConfig
from pluglm.kv.files import KIND, LoadedKV
from pluglm.kv.sealed import SealedFile, seal

PROMPT = ids(*range(40, 61))  # 21 tokens


def cached(
    path: Path, /, use: str = "hash_prefix", block_size: int = 4, make: Any = fake_config, **slots: Any
) -> RunConfig:
    """A run whose KV manager caches prefixes."""
    kv = {"use": use, "block_size": block_size, **slots.pop("kv", {})}
    config: RunConfig = make(path, kv=kv, **slots)
    return config


def answer(engine: Engine, prompt: dict[str, list[int]] = PROMPT, salt: str = "") -> RequestOutput:
    """The greedy output of one request."""
    output = RequestOutput("", [])
    request_id = engine.submit(prompt, GREEDY, salt=salt)
    for event in engine.events(request_id):
        output.add(event)
    return output


def num_cached(output: RequestOutput) -> int:
    if output.metrics is None:
        raise AssertionError(output.error)
    return output.metrics.num_cached_tokens


def saved(config: RunConfig, path: Path, prompt: dict[str, list[int]] = PROMPT, salt: str = "") -> list[int]:
    """Run the prompt without any file, save its KV, return the tokens."""
    with Engine(config) as engine:
        output = answer(engine, prompt, salt)
        engine.save_kv(prompt, path, salt=salt)
        require_idle(engine)
    return output.token_ids


def resealed(path: Path, change: Any) -> None:
    """Let `change` alter document and tensors of a file, with checksums made anew."""
    file = SealedFile(KIND, path.read_bytes())
    document, tensors = file.document, file.tensors()
    change(document, tensors)
    path.write_bytes(seal(KIND, document, tensors))


def require_miss(loaded: LoadedKV, path: Path, what: str = "") -> None:
    if loaded.num_tokens or not loaded.reason.startswith(f"{path}: ") or what not in loaded.reason:
        raise AssertionError(f"expected a miss that says '{what}', got {loaded}")
    if "\n" in loaded.reason:
        raise AssertionError(f"not one line: {loaded.reason}")
