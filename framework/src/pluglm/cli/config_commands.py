"""The command lines of `pluglm config`: show, check and schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pluglm.cli.exits import DONE, guarded
from pluglm.cli.options import ConfigFile, Sets

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at run configs without loading a model.")

AsPlan = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Print JSON: for every slot the component's distribution, version, class, interface version and config.",
    ),
]
Expect = Annotated[
    Path | None,
    typer.Option("--expect", metavar="PLAN.json", help="Fail unless the plan equals this one (from show --plan)."),
]


@app.command(short_help="Print a config with every default and each value's origin.")
@guarded
def show(ctx: typer.Context, config: ConfigFile, sets: Sets = None, plan: AsPlan = False) -> int:
    """Print CONFIG with every default filled in and where each value came from.

    The output is a config again: it runs the same components with the same keys.
    """
    from pluglm.assembly.resolving import resolve
    from pluglm.cli.config_loading import load_config
    from pluglm.cli.config_origins import config_yaml

    run = resolve(load_config(config, sets))
    typer.echo(json.dumps(run.plan(), indent=2, ensure_ascii=False) if plan else config_yaml(run))
    return DONE


@app.command(short_help="Check a config and the components it names.")
@guarded
def check(ctx: typer.Context, config: ConfigFile, sets: Sets = None, expect: Expect = None) -> int:
    """Check CONFIG: keys and values, that every named component is installed, sound and fits the others, and that
    they honour the config's own sampling parameters; that the model's path or name exists, a drafter's own model
    too, and that a draft head is there and of the drafter's kind.

    Nothing is built and neither the model nor the hub is asked, so what depends on the model (such as how many layers
    may draft), on this machine's devices, or on several keys at once (such as the dtype of a deterministic run) shows
    only in a run.
    """
    from pluglm.assembly.default_params import check_default_params
    from pluglm.assembly.named_files import check_files, check_model_name
    from pluglm.assembly.resolving import require_same_plan, resolve
    from pluglm.cli.config_loading import load_config
    from pluglm.cli.plan_file import read_plan

    expected = read_plan(expect) if expect is not None else None
    run = resolve(load_config(config, sets))
    check_default_params(run)
    check_model_name(run)
    check_files(run)
    if expected is not None:
        require_same_plan(run.plan(), expected)
    slots = ", ".join(f"{slot} {part.entry.name}" for slot, part in run.slots.items())
    same = f", same plan as {expect}" if expect is not None else ""
    typer.echo(f"{config}: ok{same} ({slots})")
    return DONE


@app.command(short_help="Print the JSON Schema of run configs.")
@guarded
def schema(ctx: typer.Context) -> int:
    """Print the JSON Schema of a run config, with the keys of every installed component in it.

    Give it to an editor or a validator. Components that cannot be loaded are left out, with a note in $comment.
    """
    from pluglm.cli.run_schema import run_schema

    built, notes = run_schema()
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(json.dumps(built, indent=2, ensure_ascii=False))
    return DONE
