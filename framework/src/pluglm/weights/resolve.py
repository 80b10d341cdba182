"""Turns what a config calls a model into a path: a path, a registered name, or a hub id. Opens no weights."""

from __future__ import annotations

import difflib
from pathlib import Path

from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.services import Progress
from pluglm.weights.hub import fetch_from_hub, is_hub_id
from pluglm.weights.messages import quoted
from pluglm.weights.registered import is_registered, registered_model, registered_names

_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def resolve_model(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The path of the model `name`, tried in this order: an existing path, a registered name, a hub id "org/name".

    revision: branch, tag or commit of a hub id; an error with anything else.
    progress: called with (label, done, total) while a hub id downloads, units as the label says (bytes or files).
    Raises CheckpointError, one line, that says what was tried; an unknown plain name lists the registered ones.
    """
    found = (_path(name) or registered_model(name)) if name.strip() else None
    if found is not None:
        _require_no_revision(name, revision)
        return found
    if is_hub_id(name):
        return fetch_from_hub(name, revision, progress)
    raise _unknown(name)


def require_known_model(name: str, revision: str | None = None) -> None:
    """Raises CheckpointError where `resolve_model` would, as far as the file system and package metadata tell.

    Runs no package's code, and takes a hub id for what it says.
    """
    if name.strip() and (_path(name) is not None or is_registered(name)):
        _require_no_revision(name, revision)
    elif not is_hub_id(name):
        raise _unknown(name)


def _path(name: str) -> Path | None:
    """None when nothing is there."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"model {quoted(name)} cannot be used as a path: {error}") from error


def _require_no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(f"model {quoted(name)} is not a hub id, so revision {quoted(revision)} means nothing")


def _unknown(name: str) -> CheckpointError:
    known = registered_names()
    if name.startswith(("/", ".", "~")) or name.lower().endswith(_FILE_ENDINGS) or "\\" in name:
        return CheckpointError(f"model {quoted(name)}: no such file or folder; check the path")
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {quoted(nearest[0])}?" if nearest else ""
    listed = ", ".join(known) or "none"
    return CheckpointError(
        f"model {quoted(name)} is no path, no registered name ({listed}) and no hub id like 'org/name'{hint}"
    )
