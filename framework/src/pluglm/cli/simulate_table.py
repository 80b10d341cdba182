"""The numbers of several runs of one trace as one table, a column for each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pluglm.cli.terminal import new_table
from pluglm.lab.metrics import REASONS, Summary, Targets, Times, summarize_groups

if TYPE_CHECKING:
    from rich.table import Table

    from pluglm.lab.simulate import Run

TIMES: dict[str, Callable[[Summary], Times]] = {
    "time to first token": lambda one: one.ttft,
    "time per output token": lambda one: one.tpot,
    "arrival to end": lambda one: one.total,
}
NUMBERS: dict[str, Callable[[Summary], str]] = {
    "goodput, requests/s": lambda one: f"{one.goodput_requests_per_s:,.2f}",
    "goodput, tokens/s": lambda one: f"{one.goodput_tokens_per_s:,.1f}",
    "throughput, requests/s": lambda one: f"{one.requests_per_s:,.2f}",
    "throughput, tokens/s": lambda one: f"{one.output_tokens_per_s:,.1f}",
    "preemptions": lambda one: f"{one.num_preemptions:,}",
    "preemptions of one request, at most": lambda one: f"{one.most_preemptions:,}",
    "recomputed tokens": lambda one: f"{one.num_recomputed_tokens:,}",
    "prompt tokens": lambda one: f"{one.num_prompt_tokens:,}",
    "cached prompt tokens": lambda one: f"{one.cache_hit_rate:.1%}",
}
RUN: dict[str, Callable[[Run], str]] = {
    "KV pool, tokens": lambda run: f"{run.kv_tokens:,}",
    "steps": lambda run: f"{len(run.steps):,}",
    "tokens a step": lambda run: f"{sum(s.num_tokens for s in run.steps) / max(len(run.steps), 1):,.1f}",
    "seconds on the backend's clock": lambda run: f"{run.clock_s:,.1f}",
    "seconds in real time": lambda run: f"{run.wall_s:,.1f}",
}


def summary_table(
    runs: Mapping[str, Run], targets: Targets, by: str | None, compared: Mapping[str, Mapping[str, str]]
) -> Table:
    """Times are of requests that completed; goodput counts those that also kept the targets and their deadline.

    compared: label of a run -> the keys it differs in and their values; they head the columns, a line for each key.
    """
    keys = dict.fromkeys(key for values in compared.values() for key in values)
    heads = ["\n".join(compared.get(label, {}).values()) or label for label in runs]
    table = new_table(None, "\n".join(keys) or "measure", *heads)
    summaries = {label: run.summary(targets) for label, run in runs.items()}

    def row(name: str, value: Callable[[Summary], str]) -> None:
        table.add_row(name, *(value(one) for one in summaries.values()))

    row("requests", lambda one: f"{one.num_requests:,}")
    for reason in REASONS:
        if any(reason in one.reasons for one in summaries.values()):
            row(f"  {reason.replace('_', ' ')}", partial(_num_ended, reason))
    for name, times in TIMES.items():
        for percentile in ("p50", "p90", "p99"):
            row(f"{name}, {percentile}", partial(_percentile, times, percentile))
    for name, number in NUMBERS.items():
        row(name, number)
    for name, of_run in RUN.items():
        table.add_row(name, *(of_run(run) for run in runs.values()))
    if by is not None:
        _add_groups(table, runs, targets, by)
    return table


def _num_ended(reason: str, summary: Summary) -> str:
    return f"{summary.reasons.get(reason, 0):,}"


def _percentile(times: Callable[[Summary], Times], name: str, summary: Summary) -> str:
    return _ms(getattr(times(summary), name))


def _add_groups(table: Table, runs: Mapping[str, Run], targets: Targets, by: str) -> None:
    groups = {label: summarize_groups(run.outcomes, targets, by) for label, run in runs.items()}
    names = sorted({name for one in groups.values() for name in one})
    for name in names:
        of_name, shown = [one[name] for one in groups.values()], name if name.isprintable() else repr(name)
        for percentile in ("p50", "p99"):
            cells = [_ms(getattr(one.ttft, percentile)) for one in of_name]
            table.add_row(f"{by} {shown or '-'}: time to first token, {percentile}", *cells)
        table.add_row(
            f"{by} {shown or '-'}: goodput, tokens/s", *(f"{one.goodput_tokens_per_s:,.1f}" for one in of_name)
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f} ms"
