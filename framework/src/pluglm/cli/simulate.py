"""The work of `pluglm simulate`: read, check every variant, replay the trace on each, show the numbers side by side."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from pluglm.assembly.resolving import resolve
from pluglm.assembly.run_config import RunConfig
from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.cli import exits
from pluglm.cli.config_loading import parse_overrides
from pluglm.cli.output import Output
from pluglm.cli.simulate_table import summary_table
from pluglm.cli.terminal import print_on, progress_bars
from pluglm.cli.warnings import warnings_on
from pluglm.kernel.errors import ConfigError
from pluglm.lab.imports import load_trace
from pluglm.lab.metrics import Targets
from pluglm.lab.simulate import Run, measure, simulate, simulated_config
from pluglm.lab.step_time import StepTime, fit_step_time, read_step_time, relative_errors, write_step_time
from pluglm.lab.svg import ttft_plot
from pluglm.lab.trace import Trace, first, sped_up, trace_digest, write_trace

Overrides = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The command line of `pluglm simulate`."""

    workload: Path
    config: Path
    sets: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    step_time: Path | None = None
    fit: Path | None = None
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    by: str | None = None
    limit: int | None = None
    speed: float | None = None
    output: Path | None = None
    trace_output: Path | None = None
    plot: Path | None = None
    quiet: bool = False
    debug: bool = False


def run_simulations(options: SimulateOptions) -> int:
    """Every variant in turn; the exit code. Raises PluglmError, where possible before anything runs."""
    if options.fit is not None and options.step_time is not None:
        raise ConfigError("--fit and --step-time cannot go together: --fit makes the file that --step-time reads")
    targets = _targets(options)
    step_time = None if options.step_time is None else read_step_time(options.step_time)
    trace = _trace(options)
    variants = _variants(options)
    target = None if options.output is None else Output(options.output)
    _require_writable("--fit", options.fit)
    _require_writable("--plot", options.plot)
    if options.plot is not None and options.plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {options.plot}: the drawing is SVG; give a name that ends with .svg")
    runs: dict[str, Run] = {}
    with warnings_on(sys.stderr, options.debug):
        if options.fit is not None:
            runs["measured"] = _measure(options, trace)
            step_time = _fit(options.fit, runs["measured"], options)
        for label, config in variants.items():
            with progress_bars(sys.stderr, options.quiet) as progress:
                runs[label] = simulate(config, trace, step_time, progress=progress)
    _show(options, runs, trace, step_time, targets, target)
    if not options.quiet and any(one.partition("=")[0].strip() in ("kv", "kv.use") for one in options.compare):
        _say_when_pools_differ([run.kv_tokens for label, run in runs.items() if label in variants])
    return _verdict(runs, options.quiet)


def _targets(options: SimulateOptions) -> Targets:
    for name, target in (("--ttft-slo", options.ttft_slo), ("--tpot-slo", options.tpot_slo)):
        if target is not None and not math.isfinite(target):
            raise ConfigError(f"{name} {target:g}: give a number of seconds, or leave it out")
    return Targets(ttft_s=options.ttft_slo, tpot_s=options.tpot_slo)


def _trace(options: SimulateOptions) -> Trace:
    trace = load_trace(options.workload)
    if options.limit is not None:
        trace = first(trace, options.limit)
    if options.speed is not None:
        if not 0 < options.speed < math.inf:
            raise ConfigError(f"--speed {options.speed:g}: give a number above 0")
        trace = sped_up(trace, options.speed)
    if options.trace_output is not None:
        write_trace(options.trace_output, trace)
    return trace


def _variants(options: SimulateOptions) -> dict[str, RunConfig]:
    """Label -> config; each one resolves, so that the last is not refused after the first has run."""
    base = parse_overrides(options.sets)
    configs = {}
    for variant in _combinations(options.compare):
        label = _label(variant)
        configs[label] = RunConfig.from_file(options.config, _merged(base, variant))
        resolve(simulated_config(configs[label]))
    return configs


def _label(variant: Overrides) -> str:
    return ", ".join(f"{key}={value}" for key, value in variant.items()) or "simulated"


def _merged(base: Overrides, variant: Overrides) -> Overrides:
    """What is compared wins. Components that it names come first, since naming one drops the keys that are there."""
    named = {key: value for key, value in variant.items() if "." not in key or key.endswith(".use")}
    return named | {key: value for key, value in base.items() if key not in variant} | variant


def _combinations(compare: Sequence[str]) -> list[Overrides]:
    """Every choice of one value for each key that is compared; one empty choice when there is nothing to compare."""
    axes: dict[str, list[Any]] = {}
    for text in compare:
        key, equals, values = text.partition("=")
        if not equals or not key.strip() or not values.strip():
            raise ConfigError(
                f"--compare {text}: write KEY.PATH=VALUE,VALUE, such as --compare scheduler.use=fcfs,fair"
            )
        try:
            axes.setdefault(key.strip(), []).extend(parse_yaml(f"[{values}]"))
        except UnreadableYamlError as error:
            raise ConfigError(f"--compare {text}: the values are not valid YAML: {error}") from error
    return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]


def _measure(options: SimulateOptions, trace: Trace) -> Run:
    config = RunConfig.from_file(options.config, parse_overrides(options.sets))
    with progress_bars(sys.stderr, options.quiet) as progress:
        return measure(config, trace, progress=progress)


def _fit(path: Path, run: Run, options: SimulateOptions) -> StepTime:
    step_time = fit_step_time(run.steps)
    errors = relative_errors(step_time, run.steps)
    about = {"workload": str(options.workload), "config": str(options.config), "num_steps": len(run.steps), **errors}
    write_step_time(path, step_time, about)
    return step_time


def _show(
    options: SimulateOptions,
    runs: Mapping[str, Run],
    trace: Trace,
    step_time: StepTime | None,
    targets: Targets,
    target: Output | None,
) -> None:
    variants = _combinations(options.compare)
    compared = {_label(one): {key: str(value) for key, value in one.items()} for one in variants}
    print_on(sys.stdout, summary_table(runs, targets, options.by, compared))
    if options.plot is not None:
        _write(options.plot, ttft_plot({label: run.outcomes for label, run in runs.items()}))
    if target is not None:
        with target:
            target.write_json(_record(options, runs, trace, step_time, targets))


def _record(
    options: SimulateOptions, runs: Mapping[str, Run], trace: Trace, step_time: StepTime | None, targets: Targets
) -> dict[str, Any]:
    """Everything that the table shows and what it was made from."""
    return {
        "workload": str(options.workload),
        "config": str(options.config),
        "set": list(options.sets),
        "trace": {"num_requests": len(trace), "digest": trace_digest(trace)},
        "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
        "step_time": None if step_time is None else step_time.model_dump(),
        "runs": {label: run.to_json(targets, options.by) for label, run in runs.items()},
    }


def _verdict(runs: Mapping[str, Run], quiet: bool) -> int:
    """Says why requests failed or were refused, each with the first reason; a failure is a component's."""
    failed = False
    for label, run in runs.items():
        for reason, say in (("refused", _say_note), ("error", exits.say_error)):
            why = [str(one.error) for one in run.outcomes if one.finish_reason == reason]
            failed |= bool(why) and reason == "error"
            if why and not (quiet and reason == "refused"):
                say(f"{label}: {len(why)} requests ended with '{reason}', the first: {why[0]}")
    return exits.FAILED if failed else exits.DONE


def _say_when_pools_differ(sizes: Sequence[int]) -> None:
    """Naming another KV manager drops its size in the file, so the comparison may be one of sizes."""
    if len(set(sizes)) > 1:
        _say_note(
            f"the KV pools differ, {min(sizes):,} to {max(sizes):,} tokens: kv.use drops the keys of the manager that "
            "it replaces; give them again, such as --set kv.num_blocks=64"
        )


def _say_note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _require_writable(option: str, path: Path | None) -> None:
    """Raises ConfigError before minutes are spent on what could not be kept."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written: no such folder, or not yours to write")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror or error}") from error
