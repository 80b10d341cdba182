"""The command lines of `pluglm plugins`: list and show."""

from __future__ import annotations

from typing import Annotated

import typer

from pluglm.cli.exits import guarded

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the installed components.")

Kind = Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only this kind, such as attention.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON array and nothing else.")]
Check = Annotated[
    bool, typer.Option("--check", help="Import each one and say whether it is sound; exit code 2 when one is not.")
]


@app.command("list", short_help="List every installed component.")
@guarded
def list_plugins(ctx: typer.Context, kind: Kind = None, as_json: AsJson = False, check: Check = False) -> int:
    """List every installed component, from package metadata alone: nothing is imported unless --check is given."""
    from pluglm.cli.plugin_list import print_plugins

    return print_plugins(kind, as_json=as_json, check=check)


@app.command(short_help="Describe one component and its keys.")
@guarded
def show(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", show_default=False, help="Such as attention or kv.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", show_default=False, help="NAME, DISTRIBUTION:NAME, module:Class or FILE.py:Class."
        ),
    ],
) -> int:
    """Import one component and print what it is, the keys it takes in a config and what it says of itself."""
    from pluglm.cli.plugin_card import print_plugin

    return print_plugin(kind, name)
