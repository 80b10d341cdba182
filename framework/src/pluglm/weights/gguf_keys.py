"""Typed, range-checked access to GGUF metadata keys. Knows no configuration format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.messages import quoted, refusal

_LARGEST_INTEGER = 1 << 31


class Keys:
    """Keys below `<architecture>.` by their short names; `root` reads full names.

    A key with a value of the wrong type or range raises CheckpointError, unless the reader is `lenient`
    (architectures that pluglm does not know): then it counts as absent.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str, *, lenient: bool) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture
        self.lenient = lenient

    def missing(self, key: str) -> CheckpointError:
        return refusal(self.path, f"lacks the metadata key {quoted(f'{self.architecture}.{key}')}; convert it again")

    def integer(self, key: str, *, least: int = 1) -> int | None:
        return self.root_integer(f"{self.architecture}.{key}", least=least)

    def required(self, key: str) -> int:
        value = self.integer(key)
        if value is None:
            raise self.missing(key)
        return value

    def number(self, key: str) -> float | None:
        """A finite number above zero; float32 values get their shortest decimal (1e-05, not 9.99999974e-06)."""
        value = self._read(f"{self.architecture}.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._wrong(f"{self.architecture}.{key}", value, "a finite number above 0")
            return None
        return float(f"{value:.7g}")

    def text(self, key: str) -> str | None:
        value = self._read(f"{self.architecture}.{key}")
        if value is None or isinstance(value, str):
            return value
        self._wrong(f"{self.architecture}.{key}", value, "a text")
        return None

    def root_integer(self, key: str, *, least: int = 0) -> int | None:
        value = self._read(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST_INTEGER:
            self._wrong(key, value, f"a whole number from {least} to {_LARGEST_INTEGER - 1}")
            return None
        return value

    def _read(self, key: str) -> Any:
        return self.metadata[key] if key in self.metadata else None  # noqa: SIM401 - get() would hide decode errors

    def _wrong(self, key: str, value: Any, wanted: str) -> None:
        if not self.lenient:
            raise refusal(self.path, f"metadata {quoted(key)} is {quoted(value)} where {wanted} is needed")
