"""What a run used and how fast it was, as tables. Knows times and counts, not how they came about."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from pluglm.assembly.resolving import capabilities_of
from pluglm.cli.plan_tables import kernels_table, threads_note
from pluglm.cli.terminal import new_table, print_on
from pluglm.kernel.interfaces.component import ATTENTION_UNUSED
from pluglm.kernel.interfaces.kv import PrefixCache
from pluglm.verification.counts import SpeculationCounts

if TYPE_CHECKING:
    from rich.table import Table

    from pluglm.assembly.resolving import Resolved, ResolvedRun
    from pluglm.engine import Engine
    from pluglm.kernel.core import RequestMetrics
    from pluglm.outputs import RequestOutput

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss' unit, see getrusage(2)


def print_summary(engine: Engine, results: Sequence[RequestOutput], stream: TextIO) -> None:
    """The tables, after an empty line that keeps them apart from streamed text."""
    stream.write("\n")
    run = engine.run
    notes = "\n".join([*_notes(run), *filter(None, [threads_note(engine)])])
    drafts = drafts_table(_metrics(results))
    parts = (components_table(run), notes, kernels_table(engine), numbers_table(run, results), drafts)
    print_on(stream, *(part for part in parts if part))


def components_table(run: ResolvedRun) -> Table:
    """One row per filled slot and hook: what filled it and from which package it came."""
    model = run.config.model
    table = new_table(f"model {model.path} ({model.dtype})", "slot", "component", "package", "class")
    for slot, part in run.parts.items():
        entry = part.entry
        package = f"{entry.distribution} {entry.version}" if entry.distribution else "loose file or module"
        table.add_row(slot, entry.name, package, entry.target)
    return table


def _notes(run: ResolvedRun) -> list[str]:
    """What `auto` chose and passed over, and a slot that this run never calls."""
    notes = []
    for slot, refused in run.auto.items():
        passed_over = "".join(f"; not {name}: {reason}" for name, reason in refused.items())
        notes.append(f"{slot}: auto chose {run.slots[slot].entry.name}{passed_over}")
    backend = run.slots["backend"]
    if ATTENTION_UNUSED in _provides(backend):
        notes.append(f"attention: never called, backend {backend.entry.name} computes none")
    return notes


def _provides(part: Resolved) -> frozenset[str]:
    return frozenset(capabilities_of(part).provides)


def numbers_table(run: ResolvedRun, results: Sequence[RequestOutput]) -> Table:
    """Speed on the backend's clock, which may be a virtual one, and the peak memory of the process."""
    table = new_table(None, "measure", f"on the clock of backend {run.slots['backend'].entry.name}")
    metrics = _metrics(results)
    table.add_row("prompts", _counts(results))
    table.add_row("tokens", _token_counts(metrics))
    table.add_row("time to first token", _times([one.ttft_s for one in metrics]))
    table.add_row("time per output token", _times([_tpot(one) for one in results]))
    table.add_row("output tokens/s", _rate(metrics))
    if issubclass(run.slots["kv"].cls, PrefixCache):
        table.add_row("cached prompt tokens", _cached(metrics))
    if preemptions := sum(one.num_preemptions for one in metrics):
        recomputed = sum(one.num_recomputed_tokens for one in metrics)
        table.add_row("preemptions", f"{preemptions:,} ({recomputed:,} tokens computed again)")
    if "drafter" in run.slots:
        table.add_row("drafts accepted", _drafts(metrics))
        table.add_row("tokens per step", _tokens_per_step(metrics))
    for name, value in _peak_memory().items():
        table.add_row(name, f"{value / 2**20:,.0f} MiB")
    return table


def drafts_table(metrics: Sequence[RequestMetrics]) -> Table | None:
    """How often the first draft of a step was kept, the second, and so on; None when nothing was drafted."""
    counts = _speculation(metrics)
    if not counts.num_drafted:
        return None
    table = new_table(None, "draft of a step", "accepted")
    pairs = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
    for position, (accepted, drafted) in enumerate(pairs, start=1):
        table.add_row(str(position), _share(accepted, drafted))
    return table


def _metrics(results: Sequence[RequestOutput]) -> list[RequestMetrics]:
    return [one.metrics for one in results if one.metrics is not None]


def _counts(results: Sequence[RequestOutput]) -> str:
    reasons = [str(one.finish_reason) for one in results]
    each = ", ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))
    return f"{len(results)} ({each})"


def _token_counts(metrics: Sequence[RequestMetrics]) -> str:
    prompt, output = sum(one.num_prompt_tokens for one in metrics), sum(one.num_output_tokens for one in metrics)
    return f"{prompt:,} in, {output:,} out"


def _times(seconds: Sequence[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0] * 1000:,.1f} ms"
    return f"{statistics.median(known) * 1000:,.1f} ms median, {max(known) * 1000:,.1f} ms longest"


def _rate(metrics: Sequence[RequestMetrics]) -> str:
    """All output tokens over the time from the first arrival to the last end."""
    if not metrics:
        return "-"
    seconds = max(one.finished_s for one in metrics) - min(one.arrival_s for one in metrics)
    return f"{sum(one.num_output_tokens for one in metrics) / seconds:,.1f}" if seconds > 0 else "-"


def _tpot(output: RequestOutput) -> float | None:
    """None where all tokens came at once, as from a search, or those of several outputs side by side."""
    if output.metrics is None or len(output.completions) > 1:
        return None
    return output.metrics.tpot_s or None


def _cached(metrics: Sequence[RequestMetrics]) -> str:
    cached, prompt = sum(one.num_cached_tokens for one in metrics), sum(one.num_prompt_tokens for one in metrics)
    return _share(cached, prompt)


def _drafts(metrics: Sequence[RequestMetrics]) -> str:
    counts = _speculation(metrics)
    return _share(counts.num_accepted, counts.num_drafted)


def _tokens_per_step(metrics: Sequence[RequestMetrics]) -> str:
    """Of the steps of one sequence that gave it tokens; a search has none."""
    counts = _speculation(metrics)
    if counts.tokens_per_step is None:
        return "-"
    return f"{counts.tokens_per_step:.2f}, {counts.accepted_per_step:.2f} of them drafts"


def _speculation(metrics: Sequence[RequestMetrics]) -> SpeculationCounts:
    return sum((one.speculation for one in metrics), SpeculationCounts())


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.0%})" if whole else "")


def _peak_memory() -> dict[str, int]:
    """Bytes: the process's largest resident set, and the most that CUDA tensors took where CUDA was used."""
    peaks = {"peak memory (RSS)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks["peak memory (CUDA)"] = torch.cuda.max_memory_allocated()
    return peaks
