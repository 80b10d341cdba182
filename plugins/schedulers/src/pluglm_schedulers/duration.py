"""Durations in configs: a number of seconds, or a number with a unit."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")


def parse_duration(value: Any) -> Any:
    """Seconds of 30, 0.5, "30s", "500ms", "2m" or "1h"; None stays None. ValueError for anything else or below zero."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a duration: write seconds (30) or a number with ms, s, m or h (30s, 2m)")
    return float(match[1]) * _UNITS_S[match[2]]


Seconds = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=float | str)]
