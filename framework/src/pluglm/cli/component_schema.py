"""The JSON Schema of one component's own keys, fit to stand beside those of the others in one document."""

from __future__ import annotations

import re
from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema

from pluglm.assembly.registry import Entry

Schema = dict[str, Any]


def component_schema(entry: Entry, cls: type[Any]) -> tuple[Schema, dict[str, Schema]]:
    """The schema of `cls.Config`, and the definitions it refers to under names that no other component has.

    A config with a type that JSON Schema cannot say is an object of any keys.
    """
    prefix = re.sub(r"[^0-9A-Za-z_-]", "_", f"{entry.kind}.{entry.distribution}.{entry.name}")
    template = f"#/$defs/{prefix}.{{model}}"
    try:
        schema: Schema = cls.Config.model_json_schema(ref_template=template)
    except PydanticInvalidForJsonSchema:
        return {"type": "object"}, {}
    defs = {f"{prefix}.{name}": one for name, one in schema.pop("$defs", {}).items()}
    if "$ref" in schema:  # a model that contains itself is a definition, too
        schema = dict(defs[schema["$ref"].removeprefix("#/$defs/")])
    return {key: value for key, value in schema.items() if key != "title"}, defs
