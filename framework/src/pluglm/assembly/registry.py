"""Finds components by name in installed packages' metadata; imports one only when a config names it.

Knows groups, names, versions and conflicts. It does not build anything and does not know what a component does.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType
from typing import Any

from pluglm.kernel.errors import PluginError, describe, nearest

# kind -> (the interface class, the version of it that this kernel speaks). Strings, so that listing imports nothing.
INTERFACES = "pluglm.kernel.interfaces."
KINDS: dict[str, tuple[str, str]] = {
    "model": (INTERFACES + "model:Model", "MODEL_VERSION"),
    "backend": (INTERFACES + "backend:Backend", "BACKEND_VERSION"),
    "attention": (INTERFACES + "attention:Attention", "ATTENTION_VERSION"),
    "kv": (INTERFACES + "kv:KVManager", "KV_VERSION"),
    "kv_format": (INTERFACES + "kv_format:KVFormat", "KV_FORMAT_VERSION"),
    "eviction": (INTERFACES + "eviction:Eviction", "EVICTION_VERSION"),
    "kv_tier": (INTERFACES + "kv_tier:KVTier", "KV_TIER_VERSION"),
    "scheduler": (INTERFACES + "scheduler:Scheduler", "SCHEDULER_VERSION"),
    "scheduling_policy": (INTERFACES + "scheduler:SchedulingPolicy", "POLICY_VERSION"),
    "sampler": (INTERFACES + "sampler:Sampler", "SAMPLER_VERSION"),
    "logits_step": (INTERFACES + "sampler:LogitsStep", "LOGITS_STEP_VERSION"),
    "quantizer": (INTERFACES + "quantizer:Quantizer", "QUANTIZER_VERSION"),
    "drafter": (INTERFACES + "drafter:Drafter", "DRAFTER_VERSION"),
    "grammar": (INTERFACES + "grammar:Grammar", "GRAMMAR_VERSION"),
    "search": (INTERFACES + "search:Search", "SEARCH_VERSION"),
    "hooks": ("pluglm.kernel.hooks:Hook", "HOOK_VERSION"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way to a component. distribution is None for a loose `module:Class`."""

    kind: str
    name: str
    target: str  # module:Class
    distribution: str | None
    version: str | None

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}, {self.target}" if self.distribution else self.target
        return f"{self.kind} '{self.name}' ({origin})"


def list_entries(kind: str | None = None) -> list[Entry]:
    """Every installed component, from package metadata alone, sorted by kind, name, distribution."""
    entries = [
        _entry(one, point) for one in ([kind] if kind else KINDS) for point in entry_points(group=f"pluglm.{one}")
    ]
    return sorted(entries, key=lambda entry: (entry.kind, entry.name, entry.distribution or ""))


def _entry(kind: str, point: EntryPoint) -> Entry:
    dist = point.dist
    name, version = (dist.metadata["Name"], dist.version) if dist else (None, None)
    return Entry(kind=kind, name=point.name, target=point.value, distribution=name, version=version)


def find(kinds: tuple[str, ...], name: str) -> Entry:
    """The entry that `name` means among `kinds`: NAME, DISTRIBUTION:NAME or MODULE:CLASS.

    Raises PluginError for an unknown name (with the choices and the nearest) and for a name that two packages claim.
    """
    entries = [entry for kind in kinds for entry in list_entries(kind)]
    matches = [entry for entry in entries if name in (entry.name, f"{entry.distribution}:{entry.name}")]
    if not matches and ":" in name:
        dist, _, plain = name.partition(":")
        matches = [e for e in entries if e.name == plain and _canonical(e.distribution or "") == _canonical(dist)]
        return matches[0] if matches else Entry(kind=kinds[0], name=name, target=name, distribution=None, version=None)
    if len(matches) > 1:
        claims = " and ".join(f"{entry.distribution} {entry.version}" for entry in matches)
        fix = " or ".join(f"'{entry.distribution}:{entry.name}'" for entry in matches)
        raise PluginError(f"{kinds[0]} '{name}' is claimed by {claims}; write {fix}")
    if not matches:
        raise PluginError(_unknown(kinds[0], name, [entry.name for entry in entries]))
    return matches[0]


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()  # PEP 503


def _unknown(kind: str, name: str, known: list[str]) -> str:
    choices = ", ".join(sorted(set(known))) or f"none (is the plugin package for '{kind}' installed?)"
    return f"{kind} '{name}' is not installed{nearest(name, known)}; choices: {choices}"


def load(entry: Entry) -> type[Any]:
    """Import the entry's class and check it against its interface. Raises PluginError naming entry and cause."""
    cls = _import(entry)
    path, version_name = KINDS[entry.kind]
    module = importlib.import_module(path.partition(":")[0])
    interface = getattr(module, path.partition(":")[2])
    _check_class(entry, cls, interface, getattr(module, version_name))
    return cls  # type: ignore[no-any-return]  # checked to be a class just above


def _import(entry: Entry) -> Any:
    module_name, _, attribute = entry.target.rpartition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
        fix = "reinstall or upgrade it" if entry.distribution else "check the module and class name"
        raise PluginError(
            f"{entry} cannot be imported: {describe(error)}; {fix}, or name another {entry.kind}"
        ) from error


def _check_class(entry: Entry, cls: Any, interface: type[Any], version: int) -> None:
    """Refuse what cannot possibly work: not a class, written for another version, methods or Config missing."""
    if not isinstance(cls, type):
        raise PluginError(f"{entry} is not a class but {type(cls).__name__}; point the entry point at the class")
    stated = getattr(cls, "interface_version", None)
    if stated != version:
        fix = "set `interface_version`" if stated is None else "install a version of the plugin made for this pluglm"
        raise PluginError(
            f"{entry} is written for {entry.kind} interface {stated}, this pluglm speaks {version}; {fix}"
        )
    missing = [name for name in _members(interface) if _lacks(cls, interface, name)]
    if missing:
        raise PluginError(f"{entry} lacks {', '.join(missing)} of {interface.__name__}; implement it")
    config = getattr(cls, "Config", None)
    if hasattr(interface, "Config") and not _strict_config(config):
        raise PluginError(
            f"{entry}: Config must be a frozen pydantic model with extra='forbid'; subclass ComponentConfig"
        )


def _members(interface: type[Any]) -> list[str]:
    """Methods and properties that the interface itself declares (Component's have working defaults)."""
    kinds = (FunctionType, property, classmethod, staticmethod)
    return [name for name, value in vars(interface).items() if not name.startswith("_") and isinstance(value, kinds)]


def _lacks(cls: type[Any], interface: type[Any], name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    declared = vars(interface)[name]
    wrong_kind = not isinstance(declared, property) and found is not None and not callable(getattr(cls, name, None))
    return found is None or found is declared or wrong_kind


def _strict_config(config: Any) -> bool:
    settings = getattr(config, "model_config", {})  # a pydantic model's
    return bool(settings.get("frozen")) and settings.get("extra") == "forbid"
