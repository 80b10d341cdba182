"""Reference cycles of JSON Schemas: found when nothing is read between two visits (core 9.4.1), and only then."""

from __future__ import annotations

import pytest

from pluglm_grammar.reference_cycles import find_reference_cycle

CYCLES = {
    "self": {"$ref": "#"},
    "chain": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "below a property": {"properties": {"p": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
    "through allOf": {"$defs": {"x": {"allOf": [{}, {"$ref": "#/$defs/x"}]}}},
    "through anyOf and oneOf": {"anyOf": [{"oneOf": [{"$ref": "#/anyOf/0"}]}]},
    "anchor": {"$defs": {"x": {"$anchor": "here", "$ref": "#here"}}},
    "old anchor": {"definitions": {"x": {"$id": "#here", "$ref": "#here"}}},
    "identifier": {"$id": "http://e.com/root", "$defs": {"x": {"$id": "x", "$ref": "http://e.com/x"}}},
    "own base": {"$id": "http://e.com/root", "$ref": "http://e.com/root#"},
    "urn": {"$id": "urn:a:b", "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#"}}},
    "escaped pointer": {"$defs": {"a/b~c d": {"$ref": "#/$defs/a~1b~0c%20d"}}},
}
FREE = {
    "nothing": {},
    "recursion through a property": {"properties": {"next": {"$ref": "#"}}},
    "recursion through items": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]},
    "twice the same": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "null"}}},
    "diamond": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}] * 2}, "b": {"type": "null"}}},
    "reference to nothing": {"$ref": "#/$defs/none"},
    "remote": {"$ref": "http://example.com/x"},
    "pointer past a list": {"$ref": "#/anyOf/7", "anyOf": [{}]},
    "property named $ref": {"properties": {"$ref": {"type": "string"}, "anyOf": {"type": "string"}}},
    "data that looks like it": {"properties": {"a": {"const": {"$ref": "#/properties/a/const/x"}}}},
    "other document": {
        "$id": "http://e.com/a",
        "$defs": {"x": {"$id": "http://e.com/b", "$ref": "a#/$defs/y"}, "y": {}},
    },
}


@pytest.mark.parametrize("name", CYCLES)
def test_found(name):
    path = find_reference_cycle(CYCLES[name])
    assert path is not None
    assert path.startswith("#")


@pytest.mark.parametrize("name", FREE)
def test_not_found(name):
    assert find_reference_cycle(FREE[name]) is None


def test_long_chains_do_not_recurse():
    definitions = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)}
    assert find_reference_cycle({"$ref": "#/$defs/d0", "$defs": {**definitions, "d5000": {"type": "null"}}}) is None
    assert (
        find_reference_cycle({"$ref": "#/$defs/d0", "$defs": {**definitions, "d5000": {"$ref": "#/$defs/d17"}}})
        is not None
    )
