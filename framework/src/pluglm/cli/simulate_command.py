"""The command line of `pluglm simulate`: its options and their help. The work is in `pluglm.cli.simulate`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pluglm.cli.exits import guarded
from pluglm.cli.options import ConfigFile, Sets


class By(StrEnum):
    """What --by may be."""

    tenant = "tenant"
    priority = "priority"


WorkloadFile = Annotated[
    Path,
    typer.Argument(
        metavar="WORKLOAD",
        show_default=False,
        help="What requests come: a workload (.yaml), a trace of ours or of Mooncake (.jsonl), or one of Azure (.csv).",
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="KEY.PATH=VALUE,VALUE,...",
        show_default=False,
        help="Simulate once for each value, side by side; VALUEs are YAML. Given more than once: every combination.",
    ),
]
StepTimeFile = Annotated[
    Path | None, typer.Option("--step-time", metavar="FILE.json", help="What a step costs, as --fit wrote it.")
]
Fit = Annotated[
    Path | None,
    typer.Option(
        "--fit",
        metavar="FILE.json",
        help="First run WORKLOAD for real, on the config's own backend and in real time, fit the step times to that "
        "run, write them to FILE and simulate with them.",
    ),
]
TtftSlo = Annotated[
    float | None,
    typer.Option("--ttft-slo", metavar="SECONDS", min=0, help="Goodput asks for a first token within this time."),
]
TpotSlo = Annotated[
    float | None,
    typer.Option("--tpot-slo", metavar="SECONDS", min=0, help="Goodput asks for at most this time per output token."),
]
GroupBy = Annotated[By | None, typer.Option("--by", help="Also show each tenant, or each priority, by itself.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N requests.")]
Speed = Annotated[
    float | None, typer.Option("--speed", metavar="X", help="Requests arrive X times as fast (below 1: slower).")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE.json", help="Also write all numbers as JSON. Replaces the file."),
]
TraceOutput = Annotated[
    Path | None,
    typer.Option(
        "--trace-output", metavar="FILE.jsonl", help="Also write the requests, as a trace to give as WORKLOAD."
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Also draw how TTFT is distributed in each run.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no notes on stderr.")]


@guarded
def simulate(
    ctx: typer.Context,
    workload: WorkloadFile,
    config: ConfigFile,
    sets: Sets = None,
    compare: Compare = None,
    step_time: StepTimeFile = None,
    fit: Fit = None,
    ttft_slo: TtftSlo = None,
    tpot_slo: TpotSlo = None,
    by: GroupBy = None,
    limit: Limit = None,
    speed: Speed = None,
    output: Output = None,
    trace_output: TraceOutput = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> int:
    """Run WORKLOAD through the scheduler and the KV memory of CONFIG on a virtual clock, without a model's arithmetic.

    Prints percentiles of the time to first token, per output token and in all, goodput, preemptions and the cache's hit
    rate. The step times are those of --step-time, else those of the config's fake backend or its defaults.
    """
    from pluglm.cli.simulate import SimulateOptions, run_simulations

    return run_simulations(
        SimulateOptions(
            workload=workload,
            config=config,
            sets=tuple(sets or ()),
            compare=tuple(compare or ()),
            step_time=step_time,
            fit=fit,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            by=None if by is None else by.value,
            limit=limit,
            speed=speed,
            output=output,
            trace_output=trace_output,
            plot=plot,
            quiet=quiet,
            debug=bool(ctx.obj),
        )
    )
