"""One thread count: the workers, every case in turns and its bounds, and the results. Installs nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from peers.bounds import Rates, Shape, measure_rates
from peers.cases import Case, interleave
from peers.driving import Worker, WorkerError
from peers.environments import variables_of
from peers.pins import ENTRANTS, OURS
from peers.results import bar_table, bars, same_start, speed_table, summarise
from peers.weights import Weights

_COMPARED_TOKENS = 32
_SPINS = 0.1  # cores used while waiting, above which a worker is named


class Field(NamedTuple):
    """pythons: contender -> the interpreter that runs it. weights: in every form. cache: for logs and caches."""

    pythons: Mapping[str, Path]
    weights: Weights
    cache: Path


def run_session(field: Field, cases: Sequence[Case], threads: int, rounds: int, console: Console) -> dict[str, Any]:
    """Prints its tables and returns them as JSON data. A worker that does not start or fails is reported in `failed`.

    Workers stay alive while others run, one works at a time; `idle_cores` says what each uses while it waits.
    """
    variables = variables_of(OURS, ENTRANTS[OURS], field.cache, threads)
    measured: list[Rates] = []
    note = functools.partial(console.print, markup=False, highlight=False)
    with ExitStack() as stack:
        failed: dict[str, str] = {}
        fallbacks: dict[str, dict[str, str]] = {}
        workers: dict[str, Worker] = {}
        for name in field.pythons:
            note(f"starting {name} with {threads} threads")
            try:
                worker, added = _start(field, name, threads, note)
                workers[name] = stack.enter_context(worker)
                fallbacks |= {name: dict(added)} if added else {}
            except WorkerError as error:
                failed[name] = f"does not start: {error}"
        agreement = _agreement(workers, field.weights.prompt_ids, failed)
        idle = {name: worker.idle_share() for name, worker in workers.items() if name not in failed}
        asks = {name: worker.ask for name, worker in workers.items() if name not in failed}
        batches = {name: ENTRANTS[name].batches for name in asks}
        measure = functools.partial(measure_rates, threads, variables)
        samples = interleave(cases, asks, batches, rounds, note, lambda case: measured.append(measure()))
        measured.append(measure())
    # Others on the machine take of its bandwidth what they please, so a case's bounds are those right around it.
    rates = {case.name: one.best(other) for case, (one, other) in zip(cases, pairwise(measured), strict=True)}
    results = summarise(cases, samples, Shape.of(field.weights.config), rates)
    failed |= samples.failed
    _show(console, threads, list(workers), results, rates, agreement, idle, failed)
    load = {name: worker.load_seconds for name, worker in workers.items()}
    return {
        "threads": threads, "rates": {name: asdict(one) for name, one in rates.items()}, "cases": results,
        "aims": bars(results), "failed": failed,
        "same_first_tokens": agreement, "idle_cores": idle, "load_s": load, "fallbacks": fallbacks,
    }  # fmt: skip


def _start(field: Field, name: str, threads: int, note: Callable[[str], None]) -> tuple[Worker, Mapping[str, str]]:
    """The worker, and what had to be added to its variables. Raises WorkerError with the reason of the first try."""
    entrant = ENTRANTS[name]
    setup = json.dumps({"path": str(field.weights.paths[entrant.reads]), "threads": threads})
    command = [str(field.pythons[name]), "-m", f"peers.workers.{entrant.worker}", setup]
    variables = variables_of(name, entrant, field.cache, threads)
    reasons: list[WorkerError] = []
    for added in ({}, *entrant.fallbacks):
        try:
            return Worker(command, {**variables, **added}, field.cache / "logs" / f"{name}-{threads}.log"), added
        except WorkerError as error:
            note(f"{name} does not start{_shown(added)}: {error}")
            reasons.append(error)
    raise reasons[0]


def _shown(added: Mapping[str, str]) -> str:
    return "".join(f" with {key}={value}" for key, value in added.items())


def _agreement(workers: Mapping[str, Worker], prompt: list[int], failed: dict[str, str]) -> dict[str, int]:
    """Contender -> greedy tokens that equal pluglm's before the first that does not; with none it is out."""
    request = {"run": "greedy", "prompt": prompt, "new_tokens": _COMPARED_TOKENS}
    token_ids: dict[str, list[int]] = {}
    for name, worker in workers.items():
        try:
            token_ids[name] = worker.ask(request)["token_ids"]
        except WorkerError as error:
            failed[name] = f"greedy: {error}"
    if OURS not in token_ids:
        return {}
    counts = {name: same_start(token_ids[OURS], ids) for name, ids in token_ids.items() if name != OURS}
    failed.update({name: "its first greedy token is not pluglm's" for name, count in counts.items() if count == 0})
    return counts


def _show(
    console: Console, threads: int, names: list[str], results: Any, rates: Any, agreement: Any, idle: Any, failed: Any
) -> None:
    console.print(speed_table(threads, names, results, rates))
    console.print(bar_table(threads, bars(results)))
    for name, count in agreement.items():
        console.print(f"{name}: first {count} of {_COMPARED_TOKENS} greedy tokens equal ours", highlight=False)
    for name, cores in idle.items():
        if cores > _SPINS:
            console.print(f"{name} uses {cores:.2f} cores while it waits; the others are slower for it")
    for name, reason in failed.items():
        console.print(f"{name} unavailable: {reason}", markup=False, highlight=False)
