"""The entry point of the `pluglm` command: the global options and the tree of commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pluglm.cli import config_commands, exits, plugins_commands, run_command, simulate_command

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, epilog=exits.HELP
)
app.command("run", short_help="Generate text from one prompt or many.")(run_command.run)
app.command("simulate", short_help="Try a workload on a config without a model, on a virtual clock.")(
    simulate_command.simulate
)
app.add_typer(config_commands.app, name="config")
app.add_typer(plugins_commands.app, name="plugins")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pluglm {version('pluglm')}")
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, not only its line.")] = False,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models from one config file in which every component can be swapped by one line."""
    ctx.obj = debug


def main() -> None:
    """Runs the command line; always ends in SystemExit with one of the codes of `exits`."""
    if sys.stderr is None:  # started with it closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    try:
        app(prog_name="pluglm")
    except KeyboardInterrupt:
        raise SystemExit(exits.interrupted()) from None
