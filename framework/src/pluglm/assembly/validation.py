"""Strict validation of configs: its errors name source, key path and the nearest key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pluglm.kernel.errors import ConfigError, PluglmError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(model: type[ModelT], data: Any, source: str, prefix: tuple[str, ...] = ()) -> ModelT:
    """`model` from data, or a one-line ConfigError: source, key path, what is wrong, the nearest or allowed keys."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_problem(model, error, prefix)}") from None


class OneLineErrors(BaseModel):
    """A model whose constructor answers wrong values with one line instead of pydantic's ValidationError.

    As a part of another model, and by model_validate, it raises ValidationError with every location, like any model.
    refusal: the error that the constructor raises.
    """

    refusal: ClassVar[type[PluglmError]] = ConfigError

    if not TYPE_CHECKING:  # checkers see the fields as keywords, as pydantic declares them

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                kind = type(self)
                raise kind.refusal(f"{kind.__name__}: {_problem(kind, error, (), whole='')}") from None

        # Else pydantic calls it for a part of another model too, whose error then loses the part's location.
        __init__.__pydantic_base_init__ = True


def _problem(
    model: type[BaseModel], error: ValidationError, prefix: tuple[str, ...], whole: str = "top level: "
) -> str:
    """One line about the first thing that is wrong. whole: what stands for the place of a problem of all of it."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])  # a typo explains the rest
    location = tuple(str(part) for part in first["loc"])
    where = f"{'.'.join((*prefix, *location))}: " if prefix or location else whole
    if first["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        hint = nearest(location[-1], known)
        return f"{where}unknown key{hint}; known keys: {', '.join(known) or 'none'}"
    if first["type"] == "missing":
        return f"{where}it is required; set it"
    what = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    is_of_several_keys = first["type"] == "value_error" and isinstance(first["input"], Mapping)  # it names them itself
    return f"{where}{what} (got {_short(first['input'])})" if where and not is_of_several_keys else f"{where}{what}"


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
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value of anybody's class, or an integer too long for Python to print
        text = f"one of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
