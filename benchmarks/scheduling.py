"""Continuous batching (`fcfs`) beside static batching (`static_batch`): same engine, model and requests, interleaved.

    python benchmarks/scheduling.py [--threads 2] [--rounds 5] [--requests 48] [--seats 8] [--record FILE.json]

Output lengths are long-tailed (log-normal, seeded, clipped to 4..128). Prints the median output tokens/s of both and
their ratio, with the steps that each takes and the milliseconds of one: the ratio is that of the steps, times that of
their cost. A seat whose request has ended costs static_batch nothing, where padded batches would go on paying for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pluglm import Engine, SamplingParams

SCHEDULERS = ("fcfs", "static_batch")
PROMPT = "The history of the printing press begins in the fifteenth century, when"
SHORTEST, LONGEST = 4, 128
MEDIAN_LENGTH, SIGMA = 16, 1.2
TARGET = 2.0


def draw_lengths(count: int, seed: int) -> list[int]:
    """Output tokens of each request: log-normal, so that most are short and a few fill the limit."""
    generator = random.Random(seed)
    drawn = [round(MEDIAN_LENGTH * generator.lognormvariate(0, SIGMA)) for _ in range(count)]
    return [min(max(length, SHORTEST), LONGEST) for length in drawn]


def time_run(engine: Engine, prompt_ids: list[int], lengths: Sequence[int]) -> tuple[float, int]:
    """Seconds and steps until every request has its tokens."""
    prompt = {"prompt_token_ids": prompt_ids}
    steps, started = 0, time.perf_counter()
    waiting = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)) for length in lengths
    ]
    while any(engine._core.is_live(name) for name in waiting):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path("benchmarks/records/scheduling.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = draw_lengths(options.requests, options.seed)
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
    steps: dict[str, int] = {}
    with ExitStack() as stack:
        settings = {"num_threads": options.threads, "max_num_seqs": options.seats}
        engines = {
            name: stack.enter_context(Engine.from_config({"engine": settings, "scheduler": name}))
            for name in SCHEDULERS
        }
        prompt_ids = engines["fcfs"].tokenizer.encode(PROMPT)
        for engine in engines.values():
            time_run(engine, prompt_ids, [SHORTEST] * options.seats)  # warm up
        for _ in range(options.rounds):
            for name, engine in engines.items():
                elapsed, steps[name] = time_run(engine, prompt_ids, lengths)
                seconds[name].append(elapsed)
    results = {name: summary(seconds[name], steps[name], sum(lengths)) for name in SCHEDULERS}
    ratio = results["fcfs"]["tokens_per_s"] / results["static_batch"]["tokens_per_s"]
    for name, one in results.items():
        print(f"{name:12} {one['tokens_per_s']:6.1f} tok/s, {one['steps']} steps of {one['step_ms']:.1f} ms")
    print(f"ratio {ratio:.2f} (target {TARGET}), of the steps alone {steps['static_batch'] / steps['fcfs']:.2f}")
    record = {
        "benchmark": "scheduling",
        "model": "smollm2-135m-instruct",
        "dtype": "bfloat16",
        "threads": options.threads,
        "seats": options.seats,
        "prompt_tokens": len(prompt_ids),
        "output_tokens": lengths,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "results": results,
        "ratio": ratio,
        "step_ratio": steps["static_batch"] / steps["fcfs"],
        "target": TARGET,
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {options.record}")


if __name__ == "__main__":
    main()
