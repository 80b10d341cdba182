"""What the keys and values of a run depend on besides tokens and salt, for one process or for any other too."""

from __future__ import annotations

import hashlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path

import torch

from pluglm.assembly.resolving import ResolvedRun
from pluglm.kernel.cache_keys import namespace
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.model import Model, ModelSpec

_SLOTS = ("backend", "attention", "quantizer", "kv_format")  # what computes and stores keys and values, with the model


class KVIdentity:
    """Two runs with equal fields give the same KV for the same tokens. Made before the weights are read."""

    def __init__(self, run: ResolvedRun, family: type[Model], spec: ModelSpec, checkpoint: Checkpoint) -> None:
        self._path, self._files = checkpoint.path, checkpoint.files
        self._states = _states(self._files)
        self._weights = ""
        plan = run.plan()
        parts = {slot: {**plan[slot], "source": _source(run.slots[slot].cls)} for slot in _SLOTS if slot in plan}
        self._fields = {
            "pluglm": version("pluglm"),
            "torch": torch.__version__,
            "model": f"{family.__module__}:{family.__qualname__} {_source(family)}",
            "spec": _digest(repr(spec)),
            "config": _digest(json.dumps(checkpoint.config, sort_keys=True, default=str)),
            "dtype": run.config.model.dtype,
            "deterministic": str(run.config.engine.deterministic),
            **{slot: json.dumps(part, sort_keys=True) for slot, part in parts.items()},
        }

    def namespace(self) -> bytes:
        """Of this process. The weight files count by name, size and time of change: reading them would take time."""
        return namespace({**self._fields, "files": json.dumps(self._states)})

    def portable_fields(self) -> dict[str, str]:
        """The weight files by content, so that they hold on any machine; read whole when first called.

        Raises CheckpointError when they are not those any more that were loaded.
        """
        if not self._weights:
            digests = [_file_digest(file) for file in self._files]
            if _states(self._files) != self._states:
                raise CheckpointError(f"{self._path}: its files changed after they were loaded; make a new engine")
            self._weights = _digest(" ".join(digests))
        return {**self._fields, "weights": self._weights}


def _states(files: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each; size and time are -1 for one that is gone."""
    found: list[tuple[str, int, int]] = []
    for file in files:
        try:
            state = file.stat()
            found.append((file.name, state.st_size, state.st_mtime_ns))
        except OSError:
            found.append((file.name, -1, -1))
    return found


def _source(cls: type[object]) -> str:
    """Digest of the module that a class is in: a loose file has no version."""
    try:
        return _file_digest(Path(inspect.getsourcefile(cls) or ""))
    except (TypeError, OSError, CheckpointError):
        return "unknown"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _file_digest(file: Path) -> str:
    """BLAKE2b (RFC 7693), 32 bytes in hexadecimal digits."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
