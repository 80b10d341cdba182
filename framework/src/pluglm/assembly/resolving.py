"""From a config to classes: resolve every name, validate every component's keys, accept or refuse the combination.

Everything that can be wrong with a name, a version, a config or a combination is found before weights are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pluglm.ahead.choice import require_possible, why_not
from pluglm.assembly.locating import locate
from pluglm.assembly.registry import Entry, load
from pluglm.assembly.run_config import RunConfig
from pluglm.assembly.validation import validate
from pluglm.kernel.config import Slot
from pluglm.kernel.errors import ComponentFailure, IncompatibleError, PluginError, PluglmError, describe
from pluglm.kernel.interfaces.component import (
    ATTENTION_UNUSED,
    BATCH_INVARIANT,
    DETERMINISTIC,
    KV_FORMATS,
    Capabilities,
    ComponentUser,
)
from pluglm.kernel.interfaces.drafter import ROWS
from pluglm.kernel.interfaces.kv import EvictionLog
from pluglm.kernel.interfaces.kv_format import FormatBackend
from pluglm.kernel.interfaces.sampler import FINAL_ROWS

SLOTS: dict[str, tuple[str, ...]] = {
    "backend": ("backend",),
    "attention": ("attention",),
    "kv": ("kv",),
    "kv_format": ("kv_format",),
    "scheduler": ("scheduler", "scheduling_policy"),
    "sampler": ("sampler",),
    "quantizer": ("quantizer",),
    "drafter": ("drafter",),
    "grammar": ("grammar",),
    "search": ("search",),
}
AUTO = {"backend": ("pluglm:cuda", "pluglm:cpu")}  # a fixed list: installing a package never changes a choice


@dataclass(frozen=True, slots=True)
class Resolved:
    """One filled slot: where the class came from, the class, its validated config."""

    entry: Entry
    cls: type[Any]
    config: Any

    def build(self, *context: Any) -> Any:
        """cls(config, *context). Raises PluginError naming the entry for whatever the constructor raises."""
        try:
            return self.cls(self.config, *context)
        except PluglmError as error:
            kind = PluginError if isinstance(error, ComponentFailure) else type(error)
            raise kind(f"{self.entry} cannot be built: {error}") from error
        except (Exception, SystemExit) as error:  # a plugin's constructor may raise anything
            raise PluginError(f"{self.entry} cannot be built: {describe(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A config with every name resolved. auto: slot -> what each candidate that was passed over said."""

    config: RunConfig
    slots: Mapping[str, Resolved]
    kv_tiers: Mapping[str, Resolved]
    hooks: Mapping[str, Resolved]
    auto: Mapping[str, Mapping[str, str]]

    @property
    def parts(self) -> dict[str, Resolved]:
        """Every filled slot, then every tier as `kv_tiers.NAME` and every hook as `hooks.NAME`, as in the config."""
        lists = {"kv_tiers": self.kv_tiers, "hooks": self.hooks}
        return {**self.slots, **{f"{key}.{name}": one for key, many in lists.items() for name, one in many.items()}}

    @property
    def names(self) -> dict[str, str]:
        """How messages call what fills each slot, and each tier."""
        slots = {slot: f"{slot} '{part.entry.name}'" for slot, part in self.slots.items()}
        return {**slots, **{f"kv_tiers.{name}": f"KV tier '{name}'" for name in self.kv_tiers}}

    def plan(self) -> dict[str, dict[str, Any]]:
        """What fills each slot, as JSON data: two processes that print the same plan run the same components."""
        return {slot: _plan_entry(part) for slot, part in self.parts.items()}


def _plan_entry(part: Resolved) -> dict[str, Any]:
    entry, config = part.entry, part.config.model_dump(mode="json")
    digest = hashlib.sha256(part.config.model_dump_json().encode()).hexdigest()[:16]
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "class": entry.target,
        "interface_version": part.cls.interface_version,
        "config": config,
        "config_digest": digest,
    }


def require_same_plan(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises PluginError naming the first slot and field in which two processes' plans differ."""
    for slot in sorted({*mine, *theirs}):
        here, there = mine.get(slot), theirs.get(slot)
        if here is None or there is None:
            raise PluginError(f"slot '{slot}' is filled in only one of the two processes; give both the same config")
        for field in sorted({*here, *there}):
            if here.get(field) != there.get(field):
                what = f"slot '{slot}': {field} is {here.get(field)!r} here and {there.get(field)!r} there"
                raise PluginError(f"{what}; install the same packages and give both the same config")


def resolve(config: RunConfig) -> ResolvedRun:
    """Import and check every named class, validate its config, check the combination. Builds nothing."""
    slots: dict[str, Resolved] = {}
    auto: dict[str, Mapping[str, str]] = {}
    for slot, kinds in SLOTS.items():
        chosen: Slot | None = getattr(config, slot)
        if chosen is None:
            continue
        if chosen.use == "auto" and slot in AUTO:
            slots[slot], auto[slot] = _choose(slot, chosen, config)
        else:
            slots[slot] = _resolve_slot(kinds, chosen, config, (slot,))
    kv_tiers = _resolve_list("kv_tier", "kv_tiers", config.kv_tiers, config)
    hooks = _resolve_list("hooks", "hooks", config.hooks, config)
    for slot, part in slots.items():
        if isinstance(part.cls, ComponentUser):
            for kind, name, options in part.cls.uses(part.config):
                _resolve_slot((kind,), Slot(use=name, **options), config, (slot, name))
    _check_combination(config, {**slots, **{f"kv_tiers.{name}": tier for name, tier in kv_tiers.items()}})
    if kv_tiers and not issubclass(slots["kv"].cls, EvictionLog):
        raise IncompatibleError(
            f"{slots['kv'].entry} cannot run with kv_tiers: it does not say what it evicts; use one that caches "
            f"prefixes, such as kv: hash_prefix, or leave kv_tiers out"
        )
    run = ResolvedRun(config=config, slots=slots, kv_tiers=kv_tiers, hooks=hooks, auto=auto)
    reason = why_not(slots["backend"].cls, slots["scheduler"].cls, run.names)
    require_possible(config.engine.plan_ahead, reason)
    return run


def _resolve_list(kind: str, key: str, many: Sequence[Slot], config: RunConfig) -> dict[str, Resolved]:
    """By name; further ones of a name get their number in the list."""
    found: dict[str, Resolved] = {}
    for index, one in enumerate(many):
        name = one.use if one.use not in found else f"{one.use}#{index}"
        found[name] = _resolve_slot((kind,), one, config, (key, str(index)))
    return found


def _resolve_slot(kinds: tuple[str, ...], slot: Slot, config: RunConfig, path: tuple[str, ...]) -> Resolved:
    try:
        entry, cls = _load(kinds, slot.use, config)
    except PluginError as error:
        raise PluginError(f"{config.source}: {'.'.join(path)}: {error}") from error
    return Resolved(entry, cls, validate(cls.Config, slot.options, config.source, path))


def _load(kinds: tuple[str, ...], name: str, config: RunConfig) -> tuple[Entry, type[Any]]:
    """The entry and its class. A MODULE:CLASS states no kind, so it is of the first kind whose interface it has."""
    entry = locate(kinds, name, config.folder)
    possible = [entry] if entry.distribution is not None else [replace(entry, kind=kind) for kind in kinds]
    errors: list[PluginError] = []
    for one in possible:
        try:
            return one, load(one)
        except PluginError as error:
            errors.append(error)
            if error.__cause__ is not None:  # it was not imported, whatever its kind
                break
    raise PluginError("; or else: ".join(map(str, errors)))


def _choose(slot: str, chosen: Slot, config: RunConfig) -> tuple[Resolved, Mapping[str, str]]:
    """The first candidate of a fixed list that this machine can run, and why the others were passed over."""
    refused: dict[str, str] = {}
    for name in AUTO[slot]:
        candidate = _resolve_slot(SLOTS[slot], chosen.model_copy(update={"use": name}), config, (slot,))
        reason = candidate.cls.unavailable()
        if reason is None:
            return candidate, refused
        refused[candidate.entry.name] = reason
    raise PluginError(f"{config.source}: {slot}: auto found nothing that runs here: {refused}")


def _check_combination(config: RunConfig, slots: Mapping[str, Resolved]) -> None:
    """Raises IncompatibleError naming the pair when a need is not met or a refused tag is present."""
    capabilities = {slot: capabilities_of(part) for slot, part in slots.items()}
    owners = {tag: slots[slot].entry for slot, one in capabilities.items() for tag in one.provides}
    tags: dict[str, str] = {tag: str(entry) for tag, entry in owners.items()}
    tags |= {f"slot:{slot}": str(part.entry) for slot, part in slots.items()}
    tags[f"dtype:{config.model.dtype}"] = f"model.dtype {config.model.dtype}"
    tags[f"verification:{config.engine.verification}"] = f"engine.verification: {config.engine.verification}"
    if config.engine.deterministic:
        tags[DETERMINISTIC] = "engine.deterministic"
    for slot, one in capabilities.items():
        for tag, reason in one.refuses.items():
            if tag in tags:
                raise IncompatibleError(f"{slots[slot].entry} cannot run with {tags[tag]}: {reason}")
        for tag, reason in one.needs.items():
            if tag not in tags:
                raise IncompatibleError(f"{slots[slot].entry} needs '{tag}', which nothing here provides: {reason}")
    if "kv_format" in slots:
        _check_format(slots, capabilities)
    if config.engine.verification != "reproducible":
        _check_verification(config, slots, capabilities)
    if config.engine.when_kv_full != "shrink" and slots["scheduler"].entry.kind == "scheduler":
        raise IncompatibleError(
            f"{slots['scheduler'].entry} cannot run with engine.when_kv_full: {config.engine.when_kv_full}: it plans "
            f"alone; leave the key out, or use a scheduling policy such as fcfs"
        )
    if config.engine.deterministic:
        for slot in ("backend", "attention", "quantizer", "kv_format"):
            if slot in slots and BATCH_INVARIANT not in capabilities[slot].provides:
                raise IncompatibleError(
                    f"{slots[slot].entry} cannot run with engine.deterministic: it does not provide '{BATCH_INVARIANT}'"
                )


def _check_verification(
    config: RunConfig, slots: Mapping[str, Resolved], capabilities: Mapping[str, Capabilities]
) -> None:
    """The other rules need rows of the drafter and of the sampler, and what they draw depends on the batch."""
    key = f"engine.verification: {config.engine.verification}"
    if config.engine.deterministic:
        raise IncompatibleError(
            f"engine.deterministic cannot run with {key}: how far drafts reach depends on the batch, and with it what "
            f"a seed gives; leave one of them out"
        )
    if "drafter" not in slots:
        raise IncompatibleError(f"{key} verifies nothing without a drafter; add one that provides '{ROWS}'")
    can_draw = "draws" in type(slots["drafter"].config).model_fields
    drawing = "set drafter.draws: true" if can_draw else "use one that draws, such as draft_model with draws: true"
    for slot, tag, hint in (("drafter", ROWS, drawing), ("sampler", FINAL_ROWS, "use another sampler, such as chain")):
        if tag not in capabilities[slot].provides:
            raise IncompatibleError(
                f"{slots[slot].entry} cannot run with {key}: it does not provide '{tag}'; {hint}, or leave the key out"
            )


def _check_format(slots: Mapping[str, Resolved], capabilities: Mapping[str, Capabilities]) -> None:
    """Who allocates, writes and reads KV must know of formats; others would take codes for numbers."""
    entry, backend, attention = slots["kv_format"].entry, slots["backend"], slots["attention"]
    if not issubclass(backend.cls, FormatBackend):
        raise IncompatibleError(f"{entry} cannot run with {backend.entry}: it keeps KV in the run's dtype only")
    is_read = KV_FORMATS in capabilities["attention"].provides or ATTENTION_UNUSED in capabilities["backend"].provides
    if not is_read:
        raise IncompatibleError(
            f"{entry} cannot run with {attention.entry}: it does not provide '{KV_FORMATS}', so it reads KV in the "
            f"run's dtype only; use another attention, or leave kv_format out"
        )


def capabilities_of(part: Resolved) -> Capabilities:
    """What the component declares for its config. Raises PluginError when it declares nonsense."""
    declare = getattr(part.cls, "capabilities", None)
    if declare is None:  # a class that does not subclass its contract, and has nothing to declare
        return Capabilities()
    try:
        found: object = declare(part.config)
    except (Exception, SystemExit) as error:  # the plugin's own code
        raise PluginError(f"{part.entry}: capabilities() raised {describe(error)}") from error
    if not isinstance(found, Capabilities):
        raise PluginError(f"{part.entry}: capabilities() must return Capabilities, not {type(found).__name__}")
    return found
