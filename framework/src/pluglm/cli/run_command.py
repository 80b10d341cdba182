"""The command line of `pluglm run`: its options and their help. The work is in `pluglm.cli.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pluglm.cli.exits import guarded
from pluglm.cli.options import ConfigFile, Sets

PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="The prompt. It becomes a user message of the model's chat template when the model has one; see --raw.",
    ),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts-file",
        metavar="FILE.jsonl",
        help='Many prompts, one JSON object a line: {"prompt": TEXT} as it is, {"prompt_token_ids": [...]}, or '
        '{"messages": [{"role": ..., "content": ...}]} through the chat template; optionally "params" (sampling '
        'parameters over those of the config) and "id". The whole file is checked before anything runs; results '
        "are JSON, one object a line, in the order of the file.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write one JSON object per prompt, and nothing else, to the output.")
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write the result to FILE, not to stdout. Replaces the file."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables on stderr.")]


@guarded
def run(
    ctx: typer.Context,
    config: ConfigFile,
    sets: Sets = None,
    prompt: PromptText = None,
    prompts_file: PromptsFile = None,
    raw: Raw = False,
    as_json: AsJson = False,
    output: OutputFile = None,
    quiet: Quiet = False,
) -> int:
    """Generate text with the model and the components of CONFIG.

    One prompt (--prompt, or standard input when it is piped) streams its text to stdout; with sampling.n above 1 the
    texts follow one another at the end. Many prompts (--prompts-file) run as one batch. The components that were used
    and the speed follow as tables on stderr.
    """
    from pluglm.cli.run import RunOptions, run_prompts

    return run_prompts(
        RunOptions(
            config=config,
            sets=tuple(sets or ()),
            prompt=prompt,
            prompts_file=prompts_file,
            raw=raw,
            as_json=as_json,
            output=output,
            quiet=quiet,
            debug=bool(ctx.obj),
        )
    )
