"""Reads the run's config for a command: the YAML file with the --set overrides on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.kernel.errors import ConfigError

if TYPE_CHECKING:
    from pluglm.assembly.run_config import RunConfig


def load_config(path: Path, sets: Sequence[str] | None) -> RunConfig:
    """The validated config. Raises ConfigError, one line, for the file or for an override."""
    from pluglm.assembly.run_config import RunConfig

    return RunConfig.from_file(path, parse_overrides(sets or ()))


def parse_overrides(sets: Sequence[str]) -> dict[str, Any]:
    """Key path -> value, in the order given; `KEY.PATH=VALUE` each, where VALUE is YAML and empty means null."""
    overrides: dict[str, Any] = {}
    for text in sets:
        key_path, equals, value = text.partition("=")
        key_path = key_path.strip()
        if not equals or not key_path:
            raise ConfigError(f"--set {text}: write KEY.PATH=VALUE, such as --set attention.use=naive")
        overrides.pop(key_path, None)  # the last one wins, in the last one's place
        overrides[key_path] = _parsed(text, value)
    return overrides


def _parsed(text: str, value: str) -> Any:
    try:
        return parse_yaml(value)
    except UnreadableYamlError as error:
        raise ConfigError(
            f"--set {text}: the value is not valid YAML ({error}); quote it: --set 'KEY=\"...\"'"
        ) from error
