"""Strict validation of configs: its errors name source, key path and the nearest key."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pluglm.kernel.errors import ConfigError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(model: type[ModelT], data: Any, source: str, prefix: tuple[str, ...] = ()) -> ModelT:
    """`model` from data, or a one-line ConfigError: source, key path, what is wrong, the nearest or allowed keys."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])  # a typo explains the rest
        location = tuple(str(part) for part in first["loc"])
        where = ".".join((*prefix, *location)) or "top level"
        if first["type"] != "extra_forbidden":
            what = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
            if first["type"] == "missing":
                raise ConfigError(f"{source}: {where}: it is required; set it") from None
            raise ConfigError(f"{source}: {where}: {what} (got {_short(first['input'])})") from None
        known = _keys_at(model, location[:-1])
        hint = nearest(location[-1], known)
        raise ConfigError(f"{source}: {where}: unknown key{hint}; known keys: {', '.join(known) or 'none'}") from None


def _keys_at(model: type[BaseModel], location: tuple[str, ...]) -> list[str]:
    """Field names of the (nested) model that a validation error's location points into."""
    current: type[BaseModel] = model
    for part in location:
        field = current.model_fields.get(part)
        nested = _model_in(field.annotation) if field else None
        current = nested or current
    return sorted(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
