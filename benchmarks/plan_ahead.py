"""What planning ahead hides: decode steps with it and without, on a stand-in for a device and on the CPU.

    python benchmarks/plan_ahead.py [--rounds 5] [--steps 60] [--only device|cpu] [--record FILE.json]

device: the fake backend, whose result comes a fixed time after its launch. Reported is the host's time that is left
between two steps: wall time less the device's, and less what the fake backend itself takes to make the tokens up.
cpu: the default model in bfloat16 with its step as it is, on a thread of its own, and on a thread with the next step
planned meanwhile; the thread is what planning ahead would take there. Rounds are interleaved over all ways of a case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from command_line import parser_of, surroundings, whole, write_record

from pluglm import Engine, RunConfig, SamplingParams

DEVICE_S = 0.002
PROMPT, WARM_UP = 40, 10
THREAD, DEVICE = "plan_ahead_backends:ThreadBackend", "plan_ahead_backends:DeviceBackend"


class Way(NamedTuple):
    """One of those that are compared."""

    name: str
    backend: str
    plan_ahead: bool


class Case(NamedTuple):
    where: str
    batch: int
    threads: int
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        return f"{self.where}, batch {self.batch}, {self.threads} thread(s)"


ON_DEVICE = (Way("in turn", DEVICE, False), Way("ahead", DEVICE, True))
ON_CPU = (Way("as it is", "cpu", False), Way("on a thread", THREAD, False), Way("ahead", THREAD, True))
CASES = [
    *(Case("device", batch, 1, ON_DEVICE) for batch in (1, 8, 64)),
    *(Case("cpu", batch, threads, ON_CPU) for threads in (1, 2) for batch in (1, 8)),
]


def make_engine(case: Case, way: Way) -> Engine:
    """With case.batch greedy sequences in the middle of their output."""
    data: dict[str, Any] = {
        "backend": way.backend,
        "sampler": "greedy",
        "engine": {
            "max_num_seqs": case.batch,
            "max_step_tokens": case.batch * PROMPT,
            "num_threads": case.threads,
            "plan_ahead": way.plan_ahead,
        },
    }
    if case.where == "device":
        data["backend"] = {"use": way.backend, "logits": "cheap", "vocab_size": 256, "device_s": DEVICE_S}
    engine = Engine.from_config(RunConfig.from_dict(data, folder=Path(__file__).parent))
    for number in range(case.batch):
        prompt = [(7 * number + i) % 250 for i in range(PROMPT)]
        engine.submit({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True))
    for _ in range(WARM_UP):
        engine.core.step()
    return engine


def timed(step: Callable[[], Any], num_steps: int) -> list[float]:
    times = []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - began_s)
    return times


def measure(case: Case, num_rounds: int, num_steps: int) -> dict[str, float]:
    """By way: the median over rounds of a round's median step in ms; on a device, of what the host has of it."""
    engines = {way: make_engine(case, way) for way in case.ways}
    medians: dict[Way, list[float]] = {way: [] for way in case.ways}
    try:
        for _ in range(num_rounds):
            for way, engine in engines.items():
                backend: Any = engine.core.parts.runner.backend
                own = backend.host_s if case.where == "device" else []
                own.clear()
                times = timed(engine.core.step, num_steps)
                if case.where == "device":
                    times = [all_s - made_s - DEVICE_S for all_s, made_s in zip(times, own, strict=True)]
                medians[way].append(1000 * statistics.median(times))
        for way, engine in engines.items():
            planning: Any = engine.core._planning
            if way.plan_ahead and planning.kept < num_rounds * num_steps:
                raise RuntimeError(f"{case}: {planning.kept} plans ahead stood and {planning.dropped} did not")
    finally:
        for engine in engines.values():
            engine.close()
    return {way.name: statistics.median(found) for way, found in medians.items()}


def main() -> None:
    parser = parser_of(__doc__, "plan_ahead.json")
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--steps", type=whole, default=60)
    parser.add_argument("--only", choices=("device", "cpu"))
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.only in (None, case.where):
            found = measure(case, options.rounds, options.steps)
            print(f"{case}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items()), flush=True)
            results.append({"where": case.where, "batch": case.batch, "threads": case.threads, "ms": found})
    record = {
        "benchmark": "plan_ahead",
        "device_ms": 1000 * DEVICE_S,
        "rounds": options.rounds,
        "steps": options.steps,
        "prompt": PROMPT,
        **surroundings(),
        "results": results,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
