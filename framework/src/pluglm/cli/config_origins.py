"""A resolved config as YAML, each value with a comment that says where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pluglm.cli.yaml_line import one_line_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from pluglm.assembly.resolving import Resolved, ResolvedRun

MAX_COLUMN = 48  # comments stand in one column, as far as the values let them


@dataclass(frozen=True, slots=True)
class Line:
    """`text` is YAML, indentation included; origin is empty for a line that only opens a section."""

    text: str
    origin: str = ""


def config_yaml(run: ResolvedRun) -> str:
    """YAML that loads as a config again, with `auto` replaced by what it chose."""
    lines = [line for name in type(run.config).model_fields for line in _section(run, name)]
    column = min(MAX_COLUMN, max(len(line.text) for line in lines))
    return "\n".join(f"{line.text:<{column}}  # {line.origin}" if line.origin else line.text for line in lines)


def _section(run: ResolvedRun, name: str) -> Iterator[Line]:
    value = getattr(run.config, name)
    if name in ("kv_tiers", "hooks"):
        yield from _list(run, name, run.kv_tiers if name == "kv_tiers" else run.hooks)
    elif name in run.slots:
        yield Line(f"{name}:")
        yield from _slot(run, name)
    elif value is None:
        yield Line(f"{name}: null", _origin(run, name, name in run.config.model_fields_set, "default"))
    else:
        yield Line(f"{name}:")
        yield from _fields(run, value, (name,), "  ", "default")


def _slot(run: ResolvedRun, slot: str) -> Iterator[Line]:
    part, chosen = run.slots[slot], getattr(run.config, slot)
    origin = _origin(run, f"{slot}.use", slot in run.config.named, "default")
    if slot in run.auto:
        passed_over = "".join(f"; not {name}: {reason}" for name, reason in run.auto[slot].items())
        yield Line(
            f"  use: {one_line_yaml(f'{part.entry.distribution}:{part.entry.name}')}", f"auto ({origin}){passed_over}"
        )
    else:
        yield Line(f"  use: {one_line_yaml(chosen.use)}", origin)
    yield from _component_fields(run, part, chosen.options, slot, "  ")


def _list(run: ResolvedRun, key: str, parts: Mapping[str, Resolved]) -> Iterator[Line]:
    origin = _origin(run, key, key in run.config.model_fields_set, "default")
    if not parts:
        yield Line(f"{key}: []", origin)
        return
    yield Line(f"{key}:")
    for part, chosen in zip(parts.values(), getattr(run.config, key), strict=True):
        yield Line(f"  - use: {one_line_yaml(chosen.use)}", origin)
        yield from _component_fields(run, part, chosen.options, key, "    ")


def _component_fields(
    run: ResolvedRun, part: Resolved, given: Mapping[str, Any], section: str, indent: str
) -> Iterator[Line]:
    """A component's config may fill in one key by another, as a sampler does the steps of a preset."""
    values: dict[str, Any] = part.config.model_dump(mode="json")
    for key, value in values.items():
        otherwise = "follows from other keys" if key in part.config.model_fields_set else "component default"
        yield Line(f"{indent}{key}: {one_line_yaml(value)}", _origin(run, f"{section}.{key}", key in given, otherwise))


def _fields(run: ResolvedRun, model: BaseModel, path: tuple[str, ...], indent: str, otherwise: str) -> Iterator[Line]:
    values: dict[str, Any] = model.model_dump(mode="json")
    for key, value in values.items():
        origin = _origin(run, ".".join((*path, key)), key in model.model_fields_set, otherwise)
        yield Line(f"{indent}{key}: {one_line_yaml(value)}", origin)


def _origin(run: ResolvedRun, key_path: str, is_given: bool, otherwise: str) -> str:
    """--set when an override hit the value, something around it or something inside it; else the file, else default."""
    if not is_given:
        return otherwise
    hit = any(
        f"{key_path}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key_path}.") for one in run.config.overridden
    )
    return "--set" if hit else "file"
