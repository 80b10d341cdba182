"""`pluglm plugins list`: rows of package metadata. Imports a component only to check it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pluglm.assembly.registry import KINDS, Entry, list_entries, load
from pluglm.cli import exits
from pluglm.kernel.errors import PluginError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One component. state: `not loaded`, `ok` or `broken`; note: the load error, or who else claims the name."""

    entry: Entry
    state: str
    note: str


def print_plugins(kind: str | None, *, as_json: bool, check: bool) -> int:
    """The rows on stdout; exit code 2 when a checked component is broken."""
    require_kind(kind)
    rows = _rows(list_entries(kind), check)
    if as_json:
        sys.stdout.write(json.dumps([_as_json(row) for row in rows], indent=2) + "\n")
    else:
        _print_table(rows)
    return exits.BAD_INPUT if any(row.state == "broken" for row in rows) else exits.DONE


def require_kind(kind: str | None) -> None:
    """Raises PluginError listing the kinds when `kind` is none of them."""
    if kind is not None and kind not in KINDS:
        raise PluginError(f"there is no kind '{kind}'; kinds: {', '.join(KINDS)}")


def _rows(entries: Sequence[Entry], check: bool) -> list[Row]:
    claims = Counter((entry.kind, entry.name) for entry in entries)
    rows = []
    for entry in entries:
        shared = claims[entry.kind, entry.name] > 1
        note = f"name claimed twice: write {entry.distribution}:{entry.name}" if shared else ""
        rows.append(_checked(entry, note) if check else Row(entry, "not loaded", note))
    return rows


def _checked(entry: Entry, note: str) -> Row:
    try:
        load(entry)
    except PluginError as error:
        return Row(entry, "broken", str(error))
    return Row(entry, "ok", note)


def _as_json(row: Row) -> dict[str, str | None]:
    entry = row.entry
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "class": entry.target,
        "state": row.state,
        "note": row.note,
    }


def _print_table(rows: Sequence[Row]) -> None:
    """On a terminal too narrow for it, the class column is left to `plugins show`: folded names are hard to read."""
    from pluglm.cli.terminal import is_too_wide, print_on

    table = _table(rows, with_class=True)
    if is_too_wide(table, sys.stdout):
        table = _table(rows, with_class=False)
    loaded = "" if any(row.state != "not loaded" for row in rows) else ", none of them loaded; --check imports each one"
    count = f"{len(rows)} component{'' if len(rows) == 1 else 's'}"
    print_on(sys.stdout, table, count + loaded)


def _table(rows: Sequence[Row], with_class: bool) -> Table:
    from pluglm.cli.terminal import new_table

    cells = {
        "kind": [row.entry.kind for row in rows],
        "name": [row.entry.name for row in rows],
        "package": [f"{row.entry.distribution} {row.entry.version}" for row in rows],
        "class": [row.entry.target for row in rows] if with_class else [],
        "state": [row.state for row in rows],
        "note": [row.note for row in rows] if any(row.note for row in rows) else [],
    }
    shown = {title: column for title, column in cells.items() if column}
    table = new_table(None, *shown)
    for line in zip(*shown.values(), strict=True):
        table.add_row(*line)
    return table
