"""The arguments that several commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", show_default=False, help="The YAML file of the run.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        show_default=False,
        help="Override one value of the config; VALUE is YAML. May be given many times; the later one wins. "
        "Examples: --set attention.use=naive --set kv.block_size=32 --set 'sampling.stop=[END, \"\\n\"]' "
        "--set drafter=null. Naming another component drops the keys of the one it replaces.",
    ),
]
