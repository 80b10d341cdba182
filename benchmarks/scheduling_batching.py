"""Continuous against static batching at mixed output lengths: output tokens per second, interleaved."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pluglm import Engine, SamplingParams

SCHEDULERS = ("fcfs", "static_batch")
PROMPT = "The history of the printing press begins in the fifteenth century, when"
SHORTEST, LONGEST = 4, 160
MEDIAN_LENGTH, SIGMA = 16, 1.2
NUM_REQUESTS, SEATS, SEED = 128, 8, 0
TARGET = 2.0


def draw_lengths() -> list[int]:
    """Output tokens of each request: log-normal, so that most are short and a few fill the limit."""
    generator = random.Random(SEED)
    drawn = [round(MEDIAN_LENGTH * generator.lognormvariate(0, SIGMA)) for _ in range(NUM_REQUESTS)]
    return [min(max(length, SHORTEST), LONGEST) for length in drawn]


def time_run(engine: Engine, prompt_ids: list[int], lengths: Sequence[int]) -> tuple[float, int]:
    """Seconds and steps until every request has its tokens."""
    prompt = {"prompt_token_ids": prompt_ids}
    steps, started = 0, time.perf_counter()
    waiting = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)) for length in lengths
    ]
    while any(engine.core.is_live(name) for name in waiting):
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    emitted = [sum(len(event.token_ids) for event in engine.events(name)) for name in waiting]
    if emitted != list(lengths):
        raise RuntimeError(f"asked for {lengths} tokens, got {emitted}")
    return seconds, steps


def summary(seconds: list[float], steps: int, num_tokens: int) -> dict[str, Any]:
    median_s = statistics.median(seconds)
    return {
        "seconds": seconds,
        "tokens_per_s": num_tokens / median_s,
        "steps": steps,
        "tokens_per_step": num_tokens / steps,
        "step_ms": 1000 * median_s / steps,
    }


def measure_batching(threads: int, rounds: int) -> dict[str, Any]:
    """The ratio is that of the steps, times that of their cost: a seat whose request has ended costs static_batch
    nothing, where padded batches would go on paying for it."""
    lengths = draw_lengths()
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
    steps: dict[str, int] = {}
    with ExitStack() as stack:
        settings = {"num_threads": threads, "max_num_seqs": SEATS}
        engines = {
            name: stack.enter_context(Engine.from_config({"engine": settings, "scheduler": name}))
            for name in SCHEDULERS
        }
        prompt_ids = engines["fcfs"].tokenizer.encode(PROMPT)
        for engine in engines.values():
            time_run(engine, prompt_ids, [SHORTEST] * SEATS)  # warm up
        for _ in range(rounds):
            for name, engine in engines.items():
                elapsed, steps[name] = time_run(engine, prompt_ids, lengths)
                seconds[name].append(elapsed)
    results = {name: summary(seconds[name], steps[name], sum(lengths)) for name in SCHEDULERS}
    ratio = results["fcfs"]["tokens_per_s"] / results["static_batch"]["tokens_per_s"]
    for name, one in results.items():
        print(f"{name:12} {one['tokens_per_s']:6.1f} tok/s, {one['steps']} steps of {one['step_ms']:.1f} ms")
    step_ratio = steps["static_batch"] / steps["fcfs"]
    print(f"ratio {ratio:.2f} (target {TARGET}), of the steps alone {step_ratio:.2f}")
    return {
        "seats": SEATS,
        "prompt_tokens": len(prompt_ids),
        "output_tokens": lengths,
        "results": results,
        "ratio": ratio,
        "step_ratio": step_ratio,
        "target": TARGET,
    }
