"""The config of a run: its keys and defaults, read from YAML or a dictionary with overrides by key path."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from pluglm.assembly.registry import list_entries
from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.assembly.validation import OneLineErrors, validate
from pluglm.kernel.config import Slot
from pluglm.kernel.errors import ConfigError
from pluglm.kernel.planner import WhenFull
from pluglm.params import SamplingParams

_NAMELESS = {  # slots that have no default component -> the kind that fills them
    **{slot: slot for slot in ("kv_format", "quantizer", "drafter", "grammar", "search", "hooks")},
    "kv_tiers": "kv_tier",
}
MOST_THREADS = 1024  # far beyond any machine; OpenMP fails in its own way on more


class ModelConfig(OneLineErrors):
    """path: a path, a name that an installed package registers, or a hub id. family: only to override model_type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    revision: str | None = None
    family: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)  # tokens; None is the model's own limit


class EngineConfig(OneLineErrors):
    """Limits of the engine loop. kv_memory: bytes for the KV cache, None is a quarter of what is free.

    max_waiting_requests, max_waiting_tokens: the queue refuses what would make it longer. when_kv_full: what gives when
    a running request finds no free block: the prefix cache and then the policy's victims (shrink), the victims first
    (preempt), the request itself (refuse), or the whole run (exit). offload_memory: host bytes for offloaded KV.
    plan_ahead: the next step is planned while a device computes this one; auto is where the components can.
    kv_tier_timeout_s: KV that a tier has not brought by then is computed instead. verification: the rule by which
    drafts are kept that a drafter drew; see docs/speculation.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_num_seqs: int = Field(default=16, ge=1, lt=2**31)
    max_step_tokens: int = Field(default=512, ge=1, lt=2**31)
    deterministic: bool = False
    verification: Literal["reproducible", "token", "block"] = "reproducible"
    num_threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    kv_memory: int | None = Field(default=None, ge=1)
    max_waiting_requests: int | None = Field(default=None, ge=1)
    max_waiting_tokens: int | None = Field(default=None, ge=1)
    when_kv_full: WhenFull = "shrink"
    offload_memory: int = Field(default=1 << 30, ge=0)
    plan_ahead: bool | Literal["auto"] = "auto"
    kv_tier_timeout_s: float = Field(default=1.0, gt=0, le=threading.TIMEOUT_MAX)
    plugin_timeout_s: float = Field(default=300.0, gt=0, le=threading.TIMEOUT_MAX)


class RunConfig(OneLineErrors):
    """One run: which component fills each slot, the model, the defaults of sampling and the engine's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    backend: Slot = Slot(use="auto")
    attention: Slot = Slot(use="paged")
    kv: Slot = Slot(use="paged")
    kv_format: Slot | None = None
    scheduler: Slot = Slot(use="fcfs")
    sampler: Slot = Slot(use="chain")
    quantizer: Slot | None = None
    drafter: Slot | None = None
    grammar: Slot | None = None
    search: Slot | None = None
    kv_tiers: tuple[Slot, ...] = ()
    hooks: tuple[Slot, ...] = ()
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig = EngineConfig()

    _source: str = PrivateAttr(default="config")
    _folder: Path | None = PrivateAttr(default=None)
    _overridden: frozenset[str] = PrivateAttr(default=frozenset())
    _named: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def source(self) -> str:
        """The file it came from, for messages."""
        return self._source

    @property
    def folder(self) -> Path | None:
        """Where `module:Class` names may find loose files."""
        return self._folder

    @property
    def overridden(self) -> frozenset[str]:
        """Key paths that were set over the file."""
        return self._overridden

    @property
    def named(self) -> frozenset[str]:
        """Slots whose component somebody named; others have the default one, maybe with keys of its own."""
        return self._named

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
        for what, value in (("a config", data), ("overrides", overrides or {})):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {what} must be a mapping of keys, not {type(value).__name__}")
        merged = _with_defaults(data)
        for key_path, value in (overrides or {}).items():
            merged = _override(merged, key_path.split("."), value, key_path)
        if overrides:
            source += f" (with {', '.join(overrides)} set over it)"
        _require_unicode(merged, source)
        _require_names(merged, source)
        config = validate(cls, merged, source)
        config._source, config._folder, config._overridden = source, folder, frozenset(overrides or {})
        config._named = frozenset(slot for one in (data, overrides or {}) for slot in _named(one))
        return config

    @model_validator(mode="before")
    @classmethod
    def _default_components(cls, data: Any) -> Any:
        return _with_defaults(data) if isinstance(data, Mapping) else data


def _require_unicode(data: Any, source: str) -> None:
    """Plans and logs are UTF-8, which has no lone surrogates; YAML and Python have them."""
    todo, seen = [data], set[int]()
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            if not one.isascii() and any("\ud800" <= character <= "\udfff" for character in one):
                raise ConfigError(f"{source}: {one!a} holds a lone surrogate, which is no character; leave it out")
        elif isinstance(one, Mapping | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            todo += [*one, *one.values()] if isinstance(one, Mapping) else one


def _require_names(data: Mapping[str, Any], source: str) -> None:
    """A slot without a default component, and each of a list, says which one it means."""
    for slot, kind in _NAMELESS.items():
        value = data.get(slot)
        many = {f"{slot}.{index}": one for index, one in enumerate(value)} if isinstance(value, list | tuple) else {}
        for key, one in (many or {slot: value}).items():
            if isinstance(one, Mapping) and "use" not in one:
                choices = ", ".join(sorted({entry.name for entry in list_entries(kind)})) or "none is installed"
                raise ConfigError(f"{source}: {key}.use: it is required; choices: {choices}")


def _with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """A slot that gives keys and no `use` means the slot's default component."""
    return {key: _with_use(key, value) for key, value in data.items()}


def _with_use(slot: str, value: Any) -> Any:
    field = RunConfig.model_fields.get(slot)
    default = field.default if field is not None else None
    if isinstance(value, Mapping) and "use" not in value and isinstance(default, Slot):
        return {"use": default.use, **value}
    return value


def _named(data: Mapping[str, Any]) -> set[str]:
    """Slots of a config, or of overrides, that have a component's name and not just keys for it."""
    whole = {key for key, value in data.items() if not isinstance(value, Mapping) or "use" in value}
    return whole | {key.removesuffix(".use") for key in data if key.endswith(".use")}


def _is_slot(key: str) -> bool:
    field = RunConfig.model_fields.get(key)
    return field is not None and field.annotation in (Slot, Slot | None)


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
        raise ConfigError(f"override {key_path}: empty key in the path")
    if not rest:
        replaces = key == "use" and data.get("use") not in (None, value)
        return {key: value} if replaces else {**data, key: value}
    below = data.get(key)
    if isinstance(below, str) and _is_slot(key):
        below = {"use": below}
    if below is not None and not isinstance(below, dict):
        raise ConfigError(
            f"override {key_path}: '{key}' is not a mapping, so nothing can be set below it; set it whole"
        )
    return {**data, key: _with_use(key, _override(below or {}, rest, value, key_path))}
