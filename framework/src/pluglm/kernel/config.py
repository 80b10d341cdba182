"""The shape of a run's config, and strict validation whose errors name source, key path and the nearest key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from pluglm.kernel.errors import ConfigError
from pluglm.kernel.sampling_params import SamplingParams

ModelT = TypeVar("ModelT", bound=BaseModel)


class Slot(BaseModel):
    """One filled slot: `{use: NAME, ...the component's own keys}`, or just NAME. The component validates its keys."""

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_only(cls, data: Any) -> Any:
        return {"use": data} if isinstance(data, str) else data

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelConfig(BaseModel):
    """path: a path, a name that an installed package registers, or a hub id. family: only to override model_type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    revision: str | None = None
    family: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)  # tokens; None is the model's own limit


class EngineConfig(BaseModel):
    """Limits of the engine loop. kv_memory: bytes for the KV cache, None is a quarter of what is free."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(default=16, ge=1)
    max_step_tokens: int = Field(default=512, ge=1)
    deterministic: bool = False
    num_threads: int | None = Field(default=None, ge=1)
    kv_memory: int | None = Field(default=None, ge=1)
    plugin_timeout_s: float = Field(default=300.0, gt=0)


class RunConfig(BaseModel):
    """One run: which component fills each slot, the model, the defaults of sampling and the engine's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    backend: Slot = Slot(use="auto")
    attention: Slot = Slot(use="sdpa")
    kv: Slot = Slot(use="paged")
    scheduler: Slot = Slot(use="fcfs")
    sampler: Slot = Slot(use="chain")
    quantizer: Slot | None = None
    drafter: Slot | None = None
    grammar: Slot | None = None
    hooks: tuple[Slot, ...] = ()
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig = EngineConfig()

    _source: str = PrivateAttr(default="config")
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def source(self) -> str:
        """The file it came from, for messages."""
        return self._source

    @property
    def folder(self) -> Path | None:
        """Where `module:Class` names may find loose files."""
        return self._folder


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
            raise ConfigError(f"{source}: {where}: {first['msg']} (got {_short(first['input'])})") from None
        known = _keys_at(model, location[:-1])
        hint = _nearest(location[-1], known)
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


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean '{close[0]}'?" if close else ""


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
