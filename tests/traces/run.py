"""Runs many random traces: `python tests/traces/run.py --traces 10000 --jobs 2 --seed 0`.

Ends with a table, and exits 1 when an invariant did not hold: those traces are shrunk, printed and can be replayed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from trace_case import Trace, to_json
from trace_choices import managers, pairs, schedulers
from trace_generate import make_trace
from trace_oracle import check_trace
from trace_play import ViolationError
from trace_shrink import same_failure, shrink

TWICE_EVERY = 10  # one trace in so many is run twice, for I13
CHUNK = 20
SHOWN = 10  # failing traces that are shrunk


@dataclass(slots=True)
class Tally:
    """What a number of traces did. failures: (trace number, its violation)."""

    counts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    most_preemptions: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.pairs += other.pairs
        self.failures += other.failures
        for name, most in other.most_preemptions.items():
            self.most_preemptions[name] = max(most, self.most_preemptions.get(name, 0))


def run_some(seed: int, first: int, last: int) -> Tally:
    """Traces first .. last - 1 of a seed."""
    tally = Tally()
    for index in range(first, last):
        trace = make_trace(index, seed)
        outcome = check_trace(trace, twice=index % TWICE_EVERY == 0)
        tally.counts += outcome.counts
        tally.counts["steps"] += len(outcome.log)
        tally.pairs[trace.policy, trace.kv] += 1
        most = tally.most_preemptions.get(trace.policy, 0)
        tally.most_preemptions[trace.policy] = max(most, outcome.most_preemptions)
        if (violation := outcome.violation) is not None:
            tally.failures.append((index, violation.invariant, violation.what))
    return tally


def _work(job: tuple[int, int, int]) -> tuple[int, Tally]:
    torch.set_num_threads(1)
    return job[2] - job[1], run_some(*job)


def run_all(seed: int, num_traces: int, num_jobs: int, console: Console) -> Tally:
    """All traces in num_jobs processes, with a bar where somebody looks."""
    jobs = [(seed, first, min(first + CHUNK, num_traces)) for first in range(0, num_traces, CHUNK)]
    tally = Tally()
    columns = (TextColumn("traces"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_jobs) as pool, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("traces", total=num_traces)
        for done, part in pool.imap_unordered(_work, jobs):
            tally.add(part)
            bar.advance(task, done)
    return tally


def report(tally: Tally, seconds: float, console: Console) -> None:
    numbers = Table("", "count", box=None, title="traces", title_justify="left")
    for name in ("traces", "violations"):
        numbers.add_row(name, f"{sum(tally.pairs.values()) if name == 'traces' else len(tally.failures):,}")
    for name, count in sorted(tally.counts.items()):
        numbers.add_row(name, f"{count:,}")
    numbers.add_row("seconds", f"{seconds:.0f}")
    names = sorted(managers())
    spread = Table("scheduler", *names, "most preemptions", box=None, title="traces of each pair", title_justify="left")
    for name in sorted(schedulers()):
        counts = [f"{tally.pairs[name, kv]:,}" for kv in names]
        spread.add_row(name, *counts, f"{tally.most_preemptions.get(name, 0):,}")
    console.print(numbers, "", spread)


def explain(trace: Trace, violation: ViolationError, console: Console) -> None:
    """The smallest trace that fails like this one, as a line to keep, and how to replay it."""
    fails = same_failure(violation, twice=True)
    if not fails(trace):
        console.print("it does not fail like that again: the code, or something outside it, has changed")
        return
    small = shrink(trace, fails)
    console.print(f"replay: python tests/traces/replay.py '{to_json(small)}'", soft_wrap=True, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, started = Console(markup=False), time.monotonic()
    tally = run_all(options.seed, options.traces, options.jobs, console)
    report(tally, time.monotonic() - started, console)
    for index, invariant, what in sorted(tally.failures)[:SHOWN]:
        console.print(f"\ntrace {index} of seed {options.seed}: {invariant}: {what}", highlight=False)
        explain(make_trace(index, options.seed), ViolationError(invariant, what), console)
    if len(tally.pairs) < min(options.traces, len(pairs())):
        console.print("not every scheduler met every manager")
        return 1
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
