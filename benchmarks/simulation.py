"""Simulated latency percentiles beside those of real runs of the same trace, on the default model.

    python benchmarks/simulation.py [--threads 2] [--rounds 3] [--requests 60] [--rate 6] [--record FILE.json]

The step-time model is fitted to one real run of a trace of another seed. Then the trace is run for real `rounds` times
and simulated once; a percentile is that of the median round, and the ratio is simulated / real. Requests arrive in real
time (a Poisson process), so a round takes requests / rate seconds and a little more. Needs a quiet machine: the printed
drift says how far the steps of each round were from those of the run that was fitted.

At 6 requests a second they queue, and a percentile sums up many steps. With `--rate 1.5` most find the engine idle:
time to first token is then that of one or two prefill steps, which the model misses by more (simulation_light.json).
"""

from __future__ import annotations

import statistics
from typing import Any

from command_line import parser_of, surroundings, whole, write_record

from pluglm import RunConfig
from pluglm.lab.generate import generate
from pluglm.lab.metrics import Summary, Targets
from pluglm.lab.simulate import measure, simulate
from pluglm.lab.step_time import fit_step_time, relative_errors
from pluglm.lab.trace import Trace
from pluglm.lab.workload import Workload

TARGET = 0.15
MEASURES = [(time, percentile) for time in ("ttft", "tpot", "total") for percentile in ("p50", "p90", "p99")]


def make_trace(seed: int, requests: int, rate: float) -> Trace:
    """Long-tailed prompts and outputs, arriving at random."""
    stream = {
        "num_arrivals": requests,
        "arrivals": {"poisson": {"rate": rate}},
        "prompt": {"lognormal": {"median": 100, "sigma": 0.7, "min": 8, "max": 600}},
        "output": {"lognormal": {"median": 40, "sigma": 0.6, "min": 4, "max": 150}},
    }
    return generate(Workload.model_validate({"seed": seed, "streams": [stream]}))


def percentiles(summary: Summary) -> dict[str, float]:
    return {f"{time}_{name}": getattr(getattr(summary, time), name) for time, name in MEASURES}


def main() -> None:
    parser = parser_of(__doc__, "simulation.json")
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--requests", type=whole, default=60)
    parser.add_argument("--rate", type=float, default=6.0, help="arrivals a second")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    engine = {"num_threads": options.threads, "max_num_seqs": 16, "max_step_tokens": 256, "kv_memory": 256 << 20}
    config = RunConfig.from_dict({"engine": engine})
    fitted_run = measure(config, make_trace(options.seed + 1, options.requests, options.rate))
    step_time = fit_step_time(fitted_run.steps)
    errors = relative_errors(step_time, fitted_run.steps)
    print(f"step time {step_time!r}, errors of its own steps {errors}")
    trace = make_trace(options.seed, options.requests, options.rate)
    runs = [measure(config, trace) for _ in range(options.rounds)]
    drift = [relative_errors(step_time, run.steps)["total"] for run in runs]
    print(f"modelled over real seconds of all steps of a round, -1: {', '.join(f'{one:.1%}' for one in drift)}")
    rounds = [percentiles(run.summary(Targets())) for run in runs]
    simulated = percentiles(simulate(config, trace, step_time).summary(Targets()))
    real = {name: statistics.median(one[name] for one in rounds) for name in simulated}
    ratios = {name: simulated[name] / real[name] for name in simulated}
    for name, ratio in ratios.items():
        each = ", ".join(f"{1000 * one[name]:.1f}" for one in rounds)
        print(
            f"{name:10} real {1000 * real[name]:8.1f} ms ({each}), simulated {1000 * simulated[name]:8.1f}: {ratio:.3f}"
        )
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    print(f"farthest from real: {worst:.1%} (target {TARGET:.0%})")
    record: dict[str, Any] = {
        "benchmark": "simulation",
        "model": config.model.path,
        "dtype": config.model.dtype,
        "threads": options.threads,
        "requests": options.requests,
        "rate": options.rate,
        **surroundings(),
        "step_time": step_time.model_dump(),
        "fit_errors": errors,
        "step_drift": drift,
        "num_steps": [len(run.steps) for run in runs],
        "rounds": rounds,
        "real": real,
        "simulated": simulated,
        "ratios": ratios,
        "worst": worst,
        "target": TARGET,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
