"""The work of `pluglm run`: check everything, load, generate, write results, say what was used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pluglm.assembly.memory_plan import MemoryPlan
from pluglm.cli import exits
from pluglm.cli.config_loading import load_config
from pluglm.cli.jobs import BadLinesError, Job, read_jobs, single_job
from pluglm.cli.output import Output
from pluglm.cli.plan_tables import memory_table
from pluglm.cli.results import result_json
from pluglm.cli.summary import print_summary
from pluglm.cli.terminal import Bars, print_on, progress_bars
from pluglm.cli.warnings import warnings_on
from pluglm.engine import Engine
from pluglm.kernel.errors import ConfigError, RequestError
from pluglm.outputs import RequestOutput
from pluglm.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line of `pluglm run`."""

    config: Path
    sets: tuple[str, ...] = ()
    prompt: str | None = None
    prompts_file: Path | None = None
    raw: bool = False
    as_json: bool = False
    output: Path | None = None
    quiet: bool = False
    debug: bool = False


def run_prompts(options: RunOptions) -> int:
    """Run the prompts; the exit code. Raises PluglmError for what is wrong before or while loading."""
    config = load_config(options.config, options.sets)
    try:
        jobs = _jobs(options, config.sampling)
    except BadLinesError as error:
        for line in error.lines:
            exits.say_error(line)
        raise
    _refuse_overwriting(options.output, options.config, "the config file")
    target = Output(options.output)
    streams = options.prompts_file is None and not options.as_json
    for name in ("logprobs", "prompt_logprobs") if streams else ():
        if getattr(jobs[0].params, name) is not None:
            raise ConfigError(f"sampling.{name} shows only in JSON; add --json, or --set sampling.{name}=null")
    with warnings_on(sys.stderr, options.debug):
        with progress_bars(sys.stderr, options.quiet) as progress:
            engine = Engine(config, progress=progress, planned=lambda plan: _show_plan(plan, progress, options))
        with engine:
            jobs = [_templated(job, engine, options.raw) for job in jobs]
            with target:
                results = [_text(engine, jobs[0], target)] if streams else _batch(engine, jobs, target, options)
            if not options.quiet:
                print_summary(engine, results, sys.stderr)
    return _verdict(jobs, results)


def _show_plan(plan: MemoryPlan, bars: Bars, options: RunOptions) -> None:
    if not options.quiet:
        with bars.hidden():
            print_on(sys.stderr, memory_table(plan))
            sys.stderr.write("\n")


def _jobs(options: RunOptions, sampling: SamplingParams) -> list[Job]:
    path = options.prompts_file
    if path is None:
        return [single_job(options.prompt, sampling)]
    if options.prompt is not None:
        raise ConfigError("--prompt and --prompts-file cannot go together; put the prompt into the file")
    if options.raw:
        raise ConfigError('--raw is for --prompt; in a prompts file "prompt" is always sent as it is')
    _refuse_overwriting(options.output, path, "the prompts file")
    return read_jobs(path, sampling)


def _refuse_overwriting(output: Path | None, source: Path, what: str) -> None:
    """Raises ConfigError when the output would replace a file that was given to be read."""
    if output is not None and output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"--output {output}: is {what} itself; choose another name")


def _templated(job: Job, engine: Engine, raw: bool) -> Job:
    """A plain prompt becomes a user message when the model has a chat template, unless --raw says not."""
    if raw or not job.plain or engine.tokenizer.chat_template is None:
        return job
    return replace(job, prompt=[{"role": "user", "content": str(job.prompt)}])


def _text(engine: Engine, job: Job, target: Output) -> RequestOutput:
    """The prompt's text as it comes, or several texts, one after another. Raises RequestError when it is refused."""
    if job.params.best_of is not None:
        return _best_text(engine, job, target)
    request_id = engine.submit(job.prompt, job.params)
    output = RequestOutput(request_id, [])
    for event in engine.events(request_id):
        output.add(event)
        if job.params.n == 1:
            target.write(event.text)
    _end_text(output, job, target, streamed=True)
    return output


def _best_text(engine: Engine, job: Job, target: Output) -> RequestOutput:
    """Texts that are known once all are drawn and ranked."""
    (output,) = engine.generate(job.prompt, job.params)
    if output.finish_reason == "refused":
        raise RequestError(str(output.error))
    _end_text(output, job, target, streamed=False)
    return output


def _end_text(output: RequestOutput, job: Job, target: Output, *, streamed: bool) -> None:
    if job.params.n == 1:
        target.write("" if streamed else output.text)
        _end_line(output.text, target)
        return
    for number, one in enumerate(output.completions, start=1):
        target.write(f"--- output {number} of {job.params.n}\n{one.text}")
        _end_line(one.text, target)


def _end_line(text: str, target: Output) -> None:
    if not text.endswith("\n"):
        target.write("\n")


def _batch(engine: Engine, jobs: Sequence[Job], target: Output, options: RunOptions) -> list[RequestOutput]:
    with progress_bars(sys.stderr, options.quiet or len(jobs) == 1) as progress:
        results = engine.generate([job.prompt for job in jobs], [job.params for job in jobs], progress=progress)
    for index, (job, output) in enumerate(zip(jobs, results, strict=True)):
        target.write_json(result_json(index, job, output))
    return results


def _verdict(jobs: Sequence[Job], results: Sequence[RequestOutput]) -> int:
    """Says which prompts failed; a refused one is the input's fault, an error is a component's."""
    for job, output in zip(jobs, results, strict=True):
        if output.finish_reason in ("refused", "error"):
            refused = "refused: " if output.finish_reason == "refused" else ""
            exits.say_error(f"{job.where}: {refused}{output.error}")
    reasons = {output.finish_reason for output in results}
    if "refused" in reasons:
        return exits.BAD_INPUT
    return exits.FAILED if "error" in reasons else exits.DONE
