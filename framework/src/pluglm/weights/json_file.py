"""Reads the small JSON files beside weights. Checks that they are objects of a sane size, not what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.messages import refusal

_LARGEST = 64 << 20


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`, read-only. Raises CheckpointError: missing, over 64 MB, not JSON, not an object."""
    if not path.is_file():
        raise refusal(path, "is missing; a model folder needs it, so copy it from the model's repository")
    with ByteSource(path) as source:
        if source.size > _LARGEST:
            raise refusal(path, f"is {source.size} bytes long, more than the {_LARGEST} that a JSON file may have")
        content = bytes(source.read(0, source.size))
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise refusal(path, f"holds a JSON {type(value).__name__} where an object is needed; download it again")
    return MappingProxyType(value)
