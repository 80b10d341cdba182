"""What the engine itself costs a decode step: everything in `EngineCore.step` except the fake backend's `execute`.

    python benchmarks/overhead.py [--threads 1] [--rounds 5] [--steps 100] [--only CASE] [--record FILE.json]

Counted: views, policy, planner, validator, KV transaction, batch tensors, the change to the guard's thread and back,
finite checks, logits steps, the draw, verification, detokenising, stop strings, publishing and events. Not counted: the
time inside `FakeBackend.execute`, which hashes tokens to logits. The targets hold for a vocabulary of 256, where
sampling is only calls; with the default model's 49,152 the passes over the logits come on top, and are reported beside.
Rounds are interleaved over all cases. A case's figure is the median of its rounds' median steps; the processor time of
both threads is given too, which another busy process does not add to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from command_line import parser_of, surroundings, whole, write_record

from pluglm import Engine, SamplingParams

BATCHES = (1, 8, 64)
VOCABULARIES = (256, 49152)
SAMPLING = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.95}}
SCHEDULERS = ("fcfs", "priority")
PROMPT, WARM_UP = 40, 10
TARGETS_MS = {1: 0.3, 64: 1.5}  # at the small vocabulary


class Case(NamedTuple):
    sampling: str
    scheduler: str
    vocab_size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.sampling}, {self.scheduler}, vocabulary {self.vocab_size}, batch {self.batch}"


class Times(NamedTuple):
    """Milliseconds on the wall, and of the processor in all threads of the process."""

    wall_ms: float
    cpu_ms: float


def measure_once(case: Case, threads: int, num_steps: int) -> Times:
    """Medians over decode steps of the whole batch, without what the backend computes."""
    config = {
        "backend": {"use": "fake", "logits": "cheap", "vocab_size": case.vocab_size},
        "scheduler": case.scheduler,
        "kv": "paged",
        "engine": {"max_num_seqs": case.batch, "max_step_tokens": case.batch * PROMPT, "num_threads": threads},
    }
    sampling = {**SAMPLING[case.sampling], "max_tokens": WARM_UP + num_steps + 10, "ignore_eos": True}
    with Engine.from_config(config) as engine:
        for i in range(case.batch):
            prompt = [(7 * i + j) % 250 for j in range(PROMPT)]
            engine.submit({"prompt_token_ids": prompt}, SamplingParams.model_validate({**sampling, "seed": i}))
        core: Any = engine.core
        for _ in range(WARM_UP):
            core.step()
        if len(core.roster.running) != case.batch:
            raise RuntimeError(f"{len(core.roster.running)} of {case.batch} sequences run")
        inside: list[Times] = []
        steps: list[Times] = []
        backend = core.parts.runner.backend
        backend.execute = timed(backend.execute, inside)
        step = timed(core.step, steps)
        for _ in range(num_steps):
            step()
    pairs = zip(steps, inside, strict=True)
    wall_ms, cpu_ms = zip(*((one.wall_ms - own.wall_ms, one.cpu_ms - own.cpu_ms) for one, own in pairs), strict=True)
    return Times(statistics.median(wall_ms), statistics.median(cpu_ms))


def timed(function: Callable[..., Any], times: list[Times]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        times.append(Times(1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)))
        return result

    return call


def verdict(case: Case, median_ms: float) -> str:
    target = TARGETS_MS.get(case.batch) if case.vocab_size == min(VOCABULARIES) else None
    return "" if target is None else f" (target {target}: {'met' if median_ms < target else 'MISSED'})"


def main() -> None:
    parser = parser_of(__doc__, "overhead.json")
    parser.add_argument("--threads", type=whole, default=1)
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--steps", type=whole, default=100)
    parser.add_argument("--only", default="", help="part of the names of the cases to run, as 'top_p, fcfs'")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [
        Case(sampling, scheduler, vocab_size, batch)
        for vocab_size in VOCABULARIES
        for sampling in SAMPLING
        for scheduler in SCHEDULERS
        for batch in BATCHES
    ]
    cases = [case for case in cases if options.only in str(case)]
    if not cases:
        parser.error(f"--only {options.only!r} is part of no case's name; one is '{Case('greedy', 'fcfs', 256, 1)}'")
    runs: dict[Case, list[Times]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            runs[case].append(measure_once(case, options.threads, options.steps))
    results = []
    for case, times in runs.items():
        wall_ms, cpu_ms = (statistics.median(one) for one in zip(*times, strict=True))
        print(f"{case}: {wall_ms:.3f} ms, of the processor {cpu_ms:.3f}{verdict(case, wall_ms)}")
        rounds = [one._asdict() for one in times]
        results.append({**case._asdict(), "rounds": rounds, "wall_ms": wall_ms, "cpu_ms": cpu_ms})
    record = {
        "benchmark": "overhead",
        "kv": "paged",
        "threads": options.threads,
        "steps": options.steps,
        "prompt": PROMPT,
        "targets_ms": TARGETS_MS,
        **surroundings(),
        "results": results,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
