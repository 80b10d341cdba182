"""Chunked against whole prefill: gaps between the tokens of running requests while a long prompt arrives."""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

from pluglm import Engine, SamplingParams

NUM_RUNNING, OUTPUT, LONG, ARRIVES_AT = 8, 64, 4000, 16
STEP_TOKENS = {"chunked": 128, "whole": 4096}
TARGET = 0.35


def gaps_of_run(engine: Engine, seed: int) -> list[float]:
    """Seconds between consecutive tokens of every running request, from when the long prompt arrives."""
    generator = random.Random(seed)
    size = engine.tokenizer.vocab_size
    draw = [generator.randrange(100, size) for _ in range(LONG)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    names = [engine.submit({"prompt_token_ids": draw[i : i + 16]}, params) for i in range(NUM_RUNNING)]
    long = ""
    last: dict[str, float] = {}
    gaps: list[float] = []
    step = 0
    while any(engine.core.is_live(name) for name in names):
        if step == ARRIVES_AT:
            long = engine.submit({"prompt_token_ids": draw}, SamplingParams(temperature=0.0, max_tokens=1))
        emitted = {one.request_id for one in engine.core.step() if one.token_ids}
        now = time.perf_counter()
        for name in names:
            if name in emitted:
                if name in last and long:
                    gaps.append(now - last[name])
                last[name] = now
        step += 1
    while engine.core.is_live(long):
        engine.core.step()
    for name in (*names, long):
        engine._drop(name)
    return gaps


def measure_chunks(threads: int, rounds: int) -> dict[str, Any]:
    gaps: dict[str, list[list[float]]] = {name: [] for name in STEP_TOKENS}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine.from_config({"engine": {"num_threads": threads, "max_step_tokens": num_tokens}})
            )
            for name, num_tokens in STEP_TOKENS.items()
        }
        for seed in range(rounds):
            for name, engine in engines.items():
                gaps[name].append(gaps_of_run(engine, seed))
    results = {
        name: {
            "p50_ms": [1000 * statistics.quantiles(one, n=100)[49] for one in runs],
            "p99_ms": [1000 * statistics.quantiles(one, n=100)[98] for one in runs],
        }
        for name, runs in gaps.items()
    }
    ratio = statistics.median(results["chunked"]["p99_ms"]) / statistics.median(results["whole"]["p99_ms"])
    for name, one in results.items():
        print(f"{name:8} p50 {statistics.median(one['p50_ms']):.0f} ms, p99 {statistics.median(one['p99_ms']):.0f} ms")
    print(f"p99 ratio {ratio:.3f} (target {TARGET} at most)")
    return {"step_tokens": STEP_TOKENS, "long_prompt": LONG, "results": results, "p99_ratio": ratio, "target": TARGET}
