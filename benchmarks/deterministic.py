"""What deterministic mode costs: decode and prefill speed with and without it, in float32, taking turns in one process.

    python benchmarks/deterministic.py [--threads 1 2] [--rounds 5] [--kernels auto] [--record FILE.json]

Both engines run the default model on the CPU backend and get the same prompts; they differ in `engine.deterministic`
alone. Decode of 32 tokens at batch 1 and 8 after a context of 64, counted from when all sequences have their first
token; prefill of 512 tokens in one step. A ratio is deterministic / fast, of the medians. Prints them beside the least
that is aimed at, and writes a JSON record with every sample.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from command_line import parser_of, surroundings, whole, write_record
from driven_engine import DrivenEngine
from peers.serving import answer
from rich.console import Console
from rich.table import Table

MODEL = "smollm2-135m-instruct"
MODES = {"fast": False, "deterministic": True}
LEAST = 0.4
CASES: dict[str, dict[str, Any]] = {
    "batch1_context64": {"run": "decode", "batch": 1, "context": 64, "new_tokens": 32},
    "batch8_context64": {"run": "decode", "batch": 8, "context": 64, "new_tokens": 32},
    "prefill_512": {"run": "prefill", "tokens": 512},
}
SEATS, STEP_TOKENS, KV_MEMORY = 8, 512, 128 << 20


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "deterministic.json")
    parser.add_argument("--threads", type=whole, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto", help="of the backend")
    return parser.parse_args()


def config_of(deterministic: bool, threads: int, kernels: str) -> dict[str, Any]:
    limits = {"max_num_seqs": SEATS, "max_step_tokens": STEP_TOKENS, "kv_memory": KV_MEMORY}
    return {
        "model": {"path": MODEL, "dtype": "float32"},
        "backend": {"use": "cpu", "kernels": kernels},
        "engine": {**limits, "num_threads": threads, "deterministic": deterministic},
    }


def measure(threads: int, rounds: int, kernels: str) -> dict[str, Any]:
    """Every case with every mode in turn, `rounds` times after one that is not counted."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(DrivenEngine(config_of(mode, threads, kernels))))
            for name, mode in MODES.items()
        }
        cases = {case: measure_case(request, engines, rounds) for case, request in CASES.items()}
        return {"threads": threads, "kernels": {name: one.kernels for name, one in engines.items()}, "cases": cases}


def measure_case(request: Mapping[str, Any], engines: Mapping[str, DrivenEngine], rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(1 + rounds):
        for name, engine in engines.items():
            reply = answer(engine, {**request, "seed": seed})
            if seed:
                speeds[name].append(reply["tokens"] / reply["seconds"])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {"tokens_per_s": speeds, "median": medians, "ratio": medians["deterministic"] / medians["fast"]}


def table_of(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="tokens/s in float32")
    for name in ("threads", "case", *MODES, "ratio", "at least", "met"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for run in runs:
        for case, one in run["cases"].items():
            speeds = (f"{one['median'][name]:.1f}" for name in MODES)
            met = "yes" if one["ratio"] >= LEAST else "no"
            table.add_row(str(run["threads"]), case, *speeds, f"{one['ratio']:.2f}", f"{LEAST:.2f}", met)
    return table


def main() -> None:
    options = parse()
    runs = [measure(threads, options.rounds, options.kernels) for threads in options.threads]
    Console().print(table_of(runs))
    record = {
        "benchmark": "deterministic",
        "model": MODEL,
        "dtype": "float32",
        **surroundings(),
        "rounds": options.rounds,
        "least": LEAST,
        "runs": runs,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
