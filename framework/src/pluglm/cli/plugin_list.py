"""`pluglm plugins list`: rows of package metadata. Imports a component only to check it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pluglm.cli import exits
from pluglm.kernel.errors import PluginError
from pluglm.kernel.registry import KINDS, Entry, list_entries, load


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
    from pluglm.cli.terminal import new_table, print_on

    table = new_table(
        None, "kind", "name", "package", "class", "state", *(["note"] if any(r.note for r in rows) else [])
    )
    for row in rows:
        entry = row.entry
        cells = [entry.kind, entry.name, f"{entry.distribution} {entry.version}", entry.target, row.state]
        table.add_row(*cells, *([row.note] if row.note else []))
    print_on(sys.stdout, table)
