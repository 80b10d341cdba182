"""Reads a plan that `pluglm config show --plan` printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pluglm.kernel.errors import ConfigError


def read_plan(path: Path) -> dict[str, Any]:
    """Slot -> fields. Raises ConfigError naming the file when it is not such a plan."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(plan, dict) or not all(isinstance(fields, dict) for fields in plan.values()):
        raise ConfigError(f"{path}: is no plan; make one with `pluglm config show CONFIG --plan`")
    return plan
