"""The JSON Schema of a run config in which every slot offers the keys of each installed component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pluglm.assembly.registry import Entry, find, list_entries, load
from pluglm.assembly.resolving import AUTO, SLOTS
from pluglm.assembly.run_config import RunConfig
from pluglm.cli.component_schema import Schema, component_schema
from pluglm.kernel.errors import PluginError


def run_schema() -> tuple[Schema, list[str]]:
    """The schema, and a line for each installed component that it lacks because it cannot be loaded.

    Dialect: JSON Schema 2020-12. Whatever the schema accepts or not, `pluglm config check` has the last word.
    """
    builder = _Builder()
    schema = RunConfig.model_json_schema()
    shared, properties = schema.pop("$defs"), schema["properties"]
    shared.pop("Slot")
    for slot, kinds in SLOTS.items():
        default = RunConfig.model_fields[slot].default
        choices = builder.choices(slot, kinds, default.use if default is not None else None)
        nullable = [{"type": "null"}] if properties[slot].get("default", "") is None else []
        properties[slot] = {"oneOf": [*choices, *nullable], "default": properties[slot].get("default")}
    for key, kind in (("kv_tiers", "kv_tier"), ("hooks", "hooks")):
        properties[key] = {"type": "array", "items": {"oneOf": builder.choices(key, (kind,))}, "default": []}
    _accept_short_forms(shared)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": {**shared, **builder.defs}}
    if builder.notes:
        schema["$comment"] = "; ".join(builder.notes)
    return schema, builder.notes


def _accept_short_forms(shared: dict[str, Schema]) -> None:
    """What the kernel's own models accept before they validate: one stop string, and {regex: ...} for a grammar."""
    stop = shared["SamplingParams"]["properties"]["stop"]
    shared["SamplingParams"]["properties"]["stop"] = {
        "anyOf": [{key: value for key, value in stop.items() if key != "default"}, {"type": "string", "minLength": 1}],
        "default": stop["default"],
    }
    short = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "propertyNames": {"not": {"enum": ["kind", "value"]}},
    }
    shared["GrammarSpec"] = {"anyOf": [shared["GrammarSpec"], short]}


class _Builder:
    """Collects the components' definitions and what could not be loaded."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}
        self.notes: list[str] = []

    def choices(self, slot: str, kinds: tuple[str, ...], default: str | None = None) -> list[Schema]:
        """One alternative per component (`{use: NAME, ...}`), the bare names, `auto`, and anything with a colon.

        Keys without `use` mean the default component.
        """
        entries = [entry for kind in kinds for entry in list_entries(kind)]
        claims = Counter(entry.name for entry in entries)
        loaded = {entry: schema for entry in entries if (schema := self._component(entry)) is not None}
        names = {entry: _names(entry, claims[entry.name] == 1) for entry in loaded}
        listed = sorted({name for one in names.values() for name in one})
        bare = [*listed, "auto"] if slot in AUTO else listed
        choices: list[Schema] = [{"enum": bare}] if bare else []
        choices += [_with_use(one, names[entry], str(entry), default) for entry, one in loaded.items()]
        if slot in AUTO:
            choices.append(self._auto(kinds, AUTO[slot], default))
        return [*choices, *_loose([entry.name for entry in entries], bare)]

    def _component(self, entry: Entry) -> Schema | None:
        try:
            schema, defs = component_schema(entry, load(entry))
        except PluginError as error:
            if (note := f"left out: {error}") not in self.notes:
                self.notes.append(note)
            return None
        self.defs |= defs
        return schema

    def _auto(self, kinds: tuple[str, ...], candidates: tuple[str, ...], default: str | None) -> Schema:
        """`auto` takes the keys that all of its candidates have."""
        properties: list[Mapping[str, Schema]] = []
        for name in candidates:
            schema = self._component(find(kinds, name))
            properties.append(schema.get("properties", {}) if schema else {})
        common = {key: one for key, one in properties[0].items() if all(key in others for others in properties)}
        return _with_use(
            {"type": "object", "properties": common, "additionalProperties": False},
            ["auto"],
            f"the first that runs on this machine: {', '.join(candidates)}",
            default,
        )


def _names(entry: Entry, is_unique: bool) -> list[str]:
    """What `use` may say for this entry; a name that two packages claim must be written with its distribution."""
    full = f"{entry.distribution}:{entry.name}"
    return [entry.name, full] if is_unique else [full]


def _with_use(schema: Schema, names: list[str], description: str, default: str | None) -> Schema:
    needed = [] if default in names else ["use"]
    use: Schema = {"const": names[0]} if len(names) == 1 else {"enum": names}
    return {
        **schema,
        "description": description,
        "properties": {"use": use, **schema.get("properties", {})},
        "required": [*needed, *schema.get("required", [])],
    }


def _loose(installed: list[str], listed: list[str]) -> list[Schema]:
    """`module:Class` and `FILE.py:Class`: nothing is known of their keys."""
    loose = {"type": "string", "pattern": ":", "not": {"enum": sorted({*installed, *listed})}}
    keys = {"type": "object", "properties": {"use": loose}, "required": ["use"]}
    return [{**loose, "description": "module:Class or FILE.py:Class"}, keys]
