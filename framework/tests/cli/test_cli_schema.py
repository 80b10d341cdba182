"""`pluglm config schema`: real configs fit it, wrong ones do not, and a broken package is a note.

Validated by the few keywords of JSON Schema 2020-12 that it uses, written down here from the specification.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
ANNOTATIONS = {"$schema", "$comment", "$defs", "title", "description", "default", "format"}
LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "minProperties": lambda value, limit: len(value) >= limit,
    "maxProperties": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, limit: re.search(limit, value) is not None,
    "required": lambda value, limit: set(limit) <= set(value),
}


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Whether the value is valid; a keyword that is not known here is an error of the test."""
    if isinstance(schema, bool):
        return schema
    return all(_keyword(value, word, argument, schema, root) for word, argument in schema.items())


def _keyword(value: Any, word: str, argument: Any, schema: Any, root: Any) -> bool:
    if word in ANNOTATIONS:
        return True
    if word == "$ref":
        return fits(value, root["$defs"][argument.removeprefix("#/$defs/")], root)
    if word == "type":
        return isinstance(value, TYPES[argument]) and (argument in ("boolean",) or not isinstance(value, bool))
    if word in ("const", "enum"):
        return value in (argument if word == "enum" else [argument])
    if word in ("oneOf", "anyOf"):
        matches = sum(fits(value, one, root) for one in argument)
        return matches == 1 if word == "oneOf" else matches >= 1
    if word == "not":
        return not fits(value, argument, root)
    if word in LIMITS:
        kinds = {"minimum": (int, float), "maximum": (int, float), "exclusiveMinimum": (int, float)}
        kinds |= {"exclusiveMaximum": (int, float), "minLength": (str,), "pattern": (str,), "minItems": (list,)}
        return not isinstance(value, kinds.get(word, (dict,))) or LIMITS[word](value, argument)
    if word == "items":
        return not isinstance(value, list) or all(fits(one, argument, root) for one in value)
    if not isinstance(value, dict):
        return True
    if word == "properties":
        return all(fits(value[key], one, root) for key, one in argument.items() if key in value)
    if word == "propertyNames":
        return all(fits(key, argument, root) for key in value)
    if word == "additionalProperties":
        return all(fits(one, argument, root) for key, one in value.items() if key not in schema.get("properties", {}))
    raise AssertionError(f"keyword {word!r} is not known here")


@pytest.fixture
def schema(pluglm) -> dict[str, Any]:
    outcome = pluglm("config", "schema")
    assert outcome.code == 0
    return json.loads(outcome.out)


def test_every_ready_config_fits(schema, configs: Path):
    for path in sorted(configs.glob("*.yaml")):
        assert fits(yaml.safe_load(path.read_text()), schema, schema), path.name


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"attention": "naive"},
        {"attention": {"use": "pluglm-attention:naive"}},
        {"backend": "auto"},
        {"backend": {"use": "auto"}},
        {"kv": {"block_size": 16}},
        {"sampler": {"steps": ["temperature", "top_k"]}},
        {"kv": {"use": "my.module:Class", "anything": [1]}},
        {"drafter": None},
        {"hooks": [{"use": "events", "path": "x"}]},
        {"sampling": {"stop": "END", "grammar": {"regex": "a"}}},
        {"sampling": {"stop": ["a", "b"], "grammar": {"kind": "regex", "value": "a"}}},
        {"scheduler": {"use": "priority", "ageing": 2}},
    ],
)
def test_every_accepted_form_fits(schema, config: dict[str, Any]):
    assert fits(config, schema, schema)


@pytest.mark.parametrize(
    "config",
    [
        {"attentoin": "naive"},
        {"attention": {"use": "nave"}},
        {"attention": None},
        {"kv": {"block_sise": 16}},
        {"drafter": {"num_tokens": 3}},
        {"kv": {"use": "paged", "block_sise": 16}},
        {"kv": {"use": "paged", "block_size": 0}},
        {"kv": {"use": "contiguous", "block_size": 16}},
        {"hooks": [{"use": "events"}]},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"grammar": {"value": "a"}}},
        {"backend": {"use": "auto", "step_base_s": 1}},
    ],
)
def test_what_a_run_would_refuse_does_not_fit(schema, config: dict[str, Any]):
    assert not fits(config, schema, schema)


def test_a_broken_package_is_left_out_with_a_note(pluglm, plugin_package):
    plugin_package("brokenkv", "[pluglm.kv]\nsplintered = brokenkv_module:KV\n", "raise OSError('no libsplinter')")
    outcome = pluglm("config", "schema")
    found = json.loads(outcome.out)
    assert outcome.code == 0
    assert "splintered" in found["$comment"]
    assert "no libsplinter" in outcome.err
    assert not fits({"kv": {"use": "splintered"}}, found, found)
    assert fits({"kv": {"use": "paged"}}, found, found)


def test_a_name_of_two_packages_must_be_written_in_full(pluglm, plugin_package):
    plugin_package("rival", "[pluglm.kv]\npaged = pluglm.kv.paged:PagedKV\n", "")
    found = json.loads(pluglm("config", "schema").out)
    assert not fits({"kv": {"use": "paged"}}, found, found)
    for name in ("pluglm:paged", "rival:paged"):
        assert fits({"kv": {"use": name, "block_size": 4}}, found, found)
