"""Turns what a config calls a model into a path: a path, a registered name, or a hub id. Opens no weights."""

from __future__ import annotations

import difflib
from pathlib import Path

from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.services import Progress
from pluglm.weights.hub import fetch_from_hub, is_hub_id
from pluglm.weights.messages import quoted
from pluglm.weights.registered import registered_model, registered_names

_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def resolve_model(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The path of the model `name`, tried in this order: an existing path, a registered name, a hub id "org/name".

    revision: branch, tag or commit of a hub id; an error with anything else.
    progress: called with (label, done, total) while a hub id downloads, units as the label says (bytes or files).
    Raises CheckpointError, one line, that says what was tried; an unknown plain name lists the registered ones.
    """
    found = _local(name) if name.strip() else None
    if found is not None and revision is not None:
        raise CheckpointError(f"model {quoted(name)} is not a hub id, so revision {quoted(revision)} means nothing")
    if found is not None:
        return found
    if is_hub_id(name):
        return fetch_from_hub(name, revision, progress)
    raise _unknown(name)


def _local(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"model {quoted(name)} cannot be used as a path: {error}") from error
    return registered_model(name)


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
