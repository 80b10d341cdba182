"""The namespace of a run's KV: what its keys and values depend on besides tokens and salt. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from pluglm.assembly.resolving import ResolvedRun
from pluglm.kernel.cache_keys import namespace
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.model import ModelSpec

_SLOTS = ("backend", "attention", "quantizer")  # what computes keys and values, with the model


def kv_namespace(run: ResolvedRun, spec: ModelSpec, checkpoint: Checkpoint) -> bytes:
    """Equal for two runs only if the same files, shape, dtype and computing components give the stored KV.

    The checkpoint's files count by name, size and time of change: reading them whole would double the time to start.
    """
    plan = {slot: one for slot, one in run.plan().items() if slot in _SLOTS}
    return namespace(
        {
            "spec": repr(spec),
            "config": json.dumps(checkpoint.config, sort_keys=True, default=str),
            "files": json.dumps(_files(checkpoint.path)),
            "dtype": run.config.model.dtype,
            "deterministic": run.config.engine.deterministic,
            "components": json.dumps(plan, sort_keys=True),
        }
    )


def _files(path: Path) -> list[tuple[str, int, int]]:
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    return [(one.name, (stat := one.stat()).st_size, stat.st_mtime_ns) for one in files]
