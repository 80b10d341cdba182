"""The public RunConfig: the kernel's model of a run, read from YAML or a dictionary with overrides by key path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, model_validator

from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.kernel import config as kernel_config
from pluglm.kernel.config import validate
from pluglm.kernel.errors import ConfigError


class RunConfig(kernel_config.RunConfig):
    __doc__ = kernel_config.RunConfig.__doc__

    _overridden: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def overridden(self) -> frozenset[str]:
        """Key paths that were set over the file."""
        return self._overridden

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Read YAML, apply `overrides` (key path -> value), validate; ConfigError names file, key path and fix."""
        path = Path(path)
        return cls.from_dict(_read_yaml(path), overrides, source=str(path), folder=path.resolve().parent)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        source: str = "config",
        folder: Path | None = None,
    ) -> RunConfig:
        """The same from a dictionary."""
        merged = _with_defaults(data)
        for key_path, value in (overrides or {}).items():
            merged = _override(merged, key_path.split("."), value, key_path)
        if overrides:
            source += f" (with {', '.join(overrides)} set over it)"
        config = validate(cls, merged, source)
        config._source, config._folder, config._overridden = source, folder, frozenset(overrides or {})
        return config

    @model_validator(mode="before")
    @classmethod
    def _default_components(cls, data: Any) -> Any:
        return _with_defaults(data) if isinstance(data, Mapping) else data


def _with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """A slot that gives keys and no `use` means the slot's default component."""
    return {key: _with_use(key, value) for key, value in data.items()}


def _with_use(slot: str, value: Any) -> Any:
    field = kernel_config.RunConfig.model_fields.get(slot)
    default = field.default if field is not None else None
    if isinstance(value, Mapping) and "use" not in value and isinstance(default, kernel_config.Slot):
        return {"use": default.use, **value}
    return value


def _is_slot(key: str) -> bool:
    field = kernel_config.RunConfig.model_fields.get(key)
    return field is not None and field.annotation in (kernel_config.Slot, kernel_config.Slot | None)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        data = parse_yaml(text)
    except UnreadableYamlError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys, not {type(data).__name__}")
    return data or {}


def _override(data: dict[str, Any], keys: list[str], value: Any, key_path: str) -> dict[str, Any]:
    """A copy of data with one value set. Naming another component drops the keys of the one it replaces."""
    key, rest = keys[0], keys[1:]
    if not key:
        raise ConfigError(f"--set {key_path}: empty key in the path")
    if not rest:
        replaces = key == "use" and data.get("use") not in (None, value)
        return {key: value} if replaces else {**data, key: value}
    below = data.get(key)
    if isinstance(below, str) and _is_slot(key):
        below = {"use": below}
    if below is not None and not isinstance(below, dict):
        raise ConfigError(f"--set {key_path}: '{key}' is not a mapping, so nothing can be set below it")
    return {**data, key: _with_use(key, _override(below or {}, rest, value, key_path))}
