"""Typed reading of a config.json dictionary; every refusal is one line that names the file and the key."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from pluglm.kernel.errors import CheckpointError

_LARGEST = 1 << 48  # far above any size of a model; products of a few still fit what torch counts with


class ConfigReader:
    """One level of a configuration. A key that is null reads like an absent one unless a method says otherwise.

    source: the file named in messages; prefix: the key path of this level ("text_config." inside a nested table).
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def refuse(self, key: str, what: str) -> CheckpointError:
        """The error to raise about `key`; `what` says what is wrong with it and what would be right."""
        return CheckpointError(" ".join(f"{self._source}: key '{self._prefix}{key}' {what}".split()))

    def has(self, key: str) -> bool:
        """Whether the key is written down, be it as null."""
        return key in self._values

    def value(self, key: str) -> Any:
        """The raw value, None when absent."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """A whole number from `least` to `most`; without a default the key is required."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, "is missing; a whole number is needed")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"is {value!r}; a whole number of at least {least} is needed")
        if value > most:
            raise self.refuse(key, f"is {value!r}; a whole number of at most {most} is needed")
        return value

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """As `integer`, where null means None and an absent key means `absent`."""
        if key not in self._values:
            return absent
        return None if self._values[key] is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero; without a default the key is required."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, "is missing; a number above 0 is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(key, f"is {value!r}; a number above 0 is needed")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """As `number`; None when the key is null or absent."""
        return None if self._values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}; true or false is needed")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | None) -> str:
        """One of the `allowed` strings; a null or absent key reads as the default."""
        value = self._values.get(key)
        value = default if value is None else value
        names = sorted(allowed)
        if value not in names:
            raise self.refuse(key, f"is {value!r}, which is not supported; supported: {', '.join(names)}")
        return str(value)

    def choices(self, key: str, allowed: Iterable[str], length: int) -> tuple[str, ...] | None:
        """`length` strings out of `allowed`, or None when the key is null or absent."""
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != length:
            raise self.refuse(key, f"is not a list of {length} entries, one a layer")
        names = sorted(allowed)
        for value in values:
            if value not in names:
                raise self.refuse(key, f"has the entry {value!r}; supported: {', '.join(names)}")
        return tuple(values)

    def table(self, key: str) -> ConfigReader | None:
        """A nested table, or None when the key is null or absent."""
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, Mapping):
            raise self.refuse(key, f"is {values!r}; a table is needed")
        return ConfigReader(values, self._source, f"{self._prefix}{key}.")

    def table_or_empty(self, key: str) -> ConfigReader:
        """As `table`, where an absent one reads as empty."""
        return self.table(key) or ConfigReader({}, self._source, f"{self._prefix}{key}.")

    def merged(self, more: Mapping[str, Any]) -> ConfigReader:
        """The same level with the keys of `more` on top."""
        return ConfigReader({**self._values, **more}, self._source, self._prefix)

    def values(self) -> Mapping[str, Any]:
        """All keys of this level."""
        return self._values
