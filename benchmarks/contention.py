"""Two processes at work on the same cores at the same time, beside one alone: they must not stop each other.

    python benchmarks/contention.py [--threads 2] [--rounds 4] [--seconds 1] [--record FILE.json]

All processes are kept on the first --threads cores, and each runs the default model in bfloat16 with as many threads:
two of them have twice as many threads as there are cores. Cases are decoding at batch 1 and 8, and reading prompts of
128 tokens. Windows of --seconds take turns: one process, both, the other one, both, with kernels `native` and with
`torch`, whose threads are OpenMP's. A share is a process's median in company / its median alone. The sum of both is 1
where nothing is lost and one alone uses all cores; one that leaves cores idle (the table says how many it uses, its
waiting included) allows for more. Prints what is aimed at for `native`, and writes a JSON record with every sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from command_line import parser_of, surroundings, whole, write_record
from contention_process import MODEL, SEATS, Busy, Case, Sample, pair
from rich.console import Console
from rich.table import Table

KERNELS = ("native", "torch")
LEAST = {"native": 0.7}  # of the sum of both shares
LEAD_SECONDS = 0.2  # before a window, in which all get to work
CASES = (Case("decode, batch 1", 1, 16, 4096), Case("decode, batch 8", SEATS, 16, 4096), Case("prefill", 1, 128, 1))


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "contention.json")
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--rounds", type=whole, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if options.threads > cores:
        parser.error(f"--threads is from 1 to the {cores} cores that this process may use")
    if options.seconds <= 0:
        parser.error("--seconds is above 0")
    return options


def sample(processes: Sequence[Busy], case: Case, seconds: float) -> list[Sample]:
    """Of each, all at the same time."""
    for one in processes:
        one.send(case)
    for one in processes:
        one.answer()
    begin = time.monotonic() + LEAD_SECONDS
    for one in processes:
        one.send((begin, begin + seconds))
    return [one.answer() for one in processes]


def measure(threads: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Samples and shares of every case with all kernels."""
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(pair(name, threads)) for name in KERNELS}
        return [measure_case(pairs, case, rounds, seconds) for case in CASES]


def measure_case(pairs: Mapping[str, list[Busy]], case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    alone: dict[str, list[list[Sample]]] = {name: [[], []] for name in pairs}
    together: dict[str, list[list[Sample]]] = {name: [] for name in pairs}
    for both in pairs.values():
        sample(both, case, seconds)  # warm up
    for _ in range(rounds):
        for name, both in pairs.items():
            for number, one in enumerate(both):
                alone[name][number] += sample([one], case, seconds)
                together[name].append(sample(both, case, seconds))
    return {**case._asdict(), "results": {name: summary(alone[name], together[name]) for name in pairs}}


def summary(alone: Sequence[Sequence[Sample]], together: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """alone[process][window], together[window][process]."""
    medians = [statistics.median(one.speed for one in samples) for samples in alone]
    shares = [[one.speed / median for one, median in zip(window, medians, strict=True)] for window in together]
    middle = [statistics.median(one) for one in zip(*shares, strict=True)]
    return {
        "alone": [[one._asdict() for one in samples] for samples in alone],
        "together": [[one._asdict() for one in window] for window in together],
        "median_alone": medians,
        "cores_alone": statistics.median(one.cores for samples in alone for one in samples),
        "shares": middle,
        "sum": sum(middle),
        "worst_sum": min(map(sum, shares)),
    }


def table_of(cases: Sequence[Mapping[str, Any]], threads: int) -> Table:
    table = Table(title=f"two processes of {threads} thread{'s'[: threads - 1]} on the same cores; new tokens/s")
    for name in ("case", "kernels", "alone", "cores", "shares", "sum", "worst", "least", "met"):
        table.add_column(name, justify="left" if name in ("case", "kernels") else "right", no_wrap=True)
    for case in cases:
        for name, one in case["results"].items():
            least = LEAST.get(name)
            aim = ("", "") if least is None else (f"{least:.2f}", "yes" if one["sum"] >= least else "no")
            alone = " / ".join(f"{speed:.1f}" for speed in one["median_alone"])
            shares = " / ".join(f"{share:.2f}" for share in one["shares"])
            sums = (f"{one[key]:.2f}" for key in ("sum", "worst_sum"))
            table.add_row(case["name"], name, alone, f"{one['cores_alone']:.2f}", shares, *sums, *aim)
    return table


def main() -> None:
    options = parse()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # of all processes that are started from here too
    cases = measure(options.threads, options.rounds, options.seconds)
    Console(width=None if Console().is_terminal else 120).print(table_of(cases, options.threads))
    record = {
        "benchmark": "contention",
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": options.seconds,
        **surroundings(),
        "least_sum": LEAST,
        "cases": cases,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
