"""Checks of a JSON Schema that must come before llguidance sees it: size, nesting, numbers it would round, cycles.

Each check raises RequestError naming the place; whether the schema is otherwise supported is the library's answer.
"""

from __future__ import annotations

import json
from typing import Any

from pluglm.kernel.errors import RequestError
from pluglm_grammar.reference_cycles import find_reference_cycle

LARGEST_EXACT_INTEGER = 2**53  # numbers are doubles inside llguidance


def read_schema(value: Any, max_nesting: int) -> dict[str, Any]:
    """A schema object from a dict, JSON text or `true`. Raises RequestError for anything else, `false` included."""
    schema = _parse(value) if isinstance(value, str) else value
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(
            f"grammar json_schema: expected a schema object, its JSON text or true, not {type(schema).__name__}"
            f"{' (false matches nothing)' if schema is False else ''}"
        )
    check_nesting(schema, max_nesting)
    return schema


def schema_text(schema: dict[str, Any]) -> str:
    """The schema as JSON. Raises RequestError for values that JSON does not have."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"grammar json_schema: not JSON: {error}") from error


def check_schema(schema: dict[str, Any]) -> None:
    """Numbers and reference cycles."""
    _check_integers(schema)
    cycle = find_reference_cycle(schema)
    if cycle is not None:
        raise RequestError(
            f"grammar json_schema: the reference at {cycle} leads back to itself without reading anything, "
            "so no text can match; remove the cycle"
        )


def check_nesting(schema: Any, max_nesting: int) -> None:
    """Level by level, since a recursive walk is what deep nesting breaks."""
    level = [schema]
    for _ in range(max_nesting):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise RequestError(f"grammar json_schema: nested deeper than {max_nesting} levels; raise grammar.max_nesting")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise RequestError("grammar json_schema: the JSON text is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"grammar json_schema: not JSON: {error}") from error


def _children(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [value for value in values if isinstance(value, dict | list | tuple)]


def _check_integers(schema: dict[str, Any]) -> None:
    queue: list[tuple[str, Any]] = [("#", schema)]
    for path, node in queue:
        if isinstance(node, dict):
            queue.extend((f"{path}/{key}", value) for key, value in node.items())
        elif isinstance(node, list | tuple):
            queue.extend((f"{path}/{index}", value) for index, value in enumerate(node))
        elif isinstance(node, int) and abs(node) > LARGEST_EXACT_INTEGER:
            raise RequestError(f"grammar json_schema: {node} at {path} is beyond ±2^53 and would be rounded")
