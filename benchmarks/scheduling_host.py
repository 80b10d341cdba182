"""The host's time of scheduling: planning, validating and booking KV for one decode step, on the fake backend."""

from __future__ import annotations

import statistics
import time
from typing import Any

from pluglm import Engine, SamplingParams

SIZES = (16, 64, 256, 512)
CASES = (("fcfs", "paged"), ("priority", "paged"), ("fcfs", "hash_prefix"), ("fcfs", "radix"))
PROMPT, STEPS = 40, 60
TARGET_MS, TARGET_GROWTH = 1.0, 8.0  # at 64 sequences; from 64 to 512


def measure_once(scheduler: str, kv: str, num_sequences: int) -> float:
    """Median milliseconds a step of views, policy, planner, validator, KV transaction and publishing."""
    backend = {"use": "fake", "logits": "cheap", "vocab_size": 1000, "memory_bytes": 1 << 34}
    engine_keys = {"max_num_seqs": num_sequences, "max_step_tokens": num_sequences * PROMPT}
    config = {"backend": backend, "scheduler": scheduler, "kv": kv, "engine": engine_keys}
    with Engine.from_config(config) as engine:
        for i in range(num_sequences):
            prompt = [(7 * i + j) % 900 + 1 for j in range(PROMPT)]
            params = SamplingParams(temperature=0, max_tokens=4 * STEPS, ignore_eos=True)
            engine.submit({"prompt_token_ids": prompt}, params)
        for _ in range(5):
            engine.step()
        core: Any = engine.core
        if len(core.roster.running) != num_sequences:
            raise RuntimeError(f"{len(core.roster.running)} of {num_sequences} sequences run")
        spent = [0.0]
        core._planning.plan = _timed(core._planning.plan, spent)
        core.memory.publish = _timed(core.memory.publish, spent)
        times = []
        for _ in range(STEPS):
            spent[0] = 0.0
            engine.step()
            times.append(1000 * spent[0])
    return statistics.median(times)


def _timed(function: Any, spent: list[float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - started

    return call


def measure_host(threads: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for scheduler, kv in CASES:
        runs = {size: [measure_once(scheduler, kv, size) for _ in range(rounds)] for size in SIZES}
        median_ms = {size: statistics.median(one) for size, one in runs.items()}
        growth = median_ms[512] / median_ms[64]
        results[f"{scheduler}, {kv}"] = {"ms": median_ms, "growth_64_to_512": growth}
        shown = ", ".join(f"{size}: {value:.2f} ms" for size, value in median_ms.items())
        print(f"{scheduler} on {kv}: {shown}; 512 / 64 = {growth:.1f} (targets {TARGET_MS} ms at 64, {TARGET_GROWTH})")
    return {"results": results, "target_ms_at_64": TARGET_MS, "target_growth": TARGET_GROWTH}
