"""JSON Schemas: which texts are taken. Valid and invalid instances follow from the keyword's section in the 2020-12
specification (core and validation), which each case names; layout follows RFC 8259.
"""

from __future__ import annotations

import json
import random

import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}}}
TREE = {**TREE, "additionalProperties": False, "required": ["v"]}

# (section, schema, valid instances, invalid instances) as JSON texts
CASES = [
    ("validation 6.1.1 type", {"type": "integer"}, ["0", "-7", "12345678901"], ["1.5", '"1"', "01", "true", "-", ""]),
    ("validation 6.1.1 type list", {"type": ["null", "boolean"]}, ["null", "true", "false"], ["0", '"null"', "[]"]),
    (
        "validation 6.1.2 enum",
        {"enum": ["a", 2, None, {"k": [1]}]},
        ['"a"', "2", "null", '{"k":[1]}'],
        ['"b"', "3", "{}"],
    ),
    ("validation 6.1.3 const", {"const": "é\n"}, ['"é\\n"'], ['"é"', '"e"']),
    ("validation 6.2.1 multipleOf", {"type": "integer", "multipleOf": 5}, ["0", "15", "-5"], ["7", "51"]),
    (
        "validation 6.2.2-5 bounds",
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
        ["-3", "0", "11"],
        ["-4", "12", "120"],
    ),
    (
        "validation 6.2.4 fraction",
        {"type": "number", "minimum": 0.5, "maximum": 1.5},
        ["0.5", "1", "1.49"],
        ["0.49", "1.51", "2"],
    ),
    (
        "validation 6.3.1-2 length",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"éé"', '"a\\nb"', '"日本☃"'],
        ['"a"', '"abcd"', '"é"'],
    ),
    ("validation 6.3.3 pattern", {"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    (
        "validation 6.3.3 not anchored",
        {"type": "string", "pattern": "[bc]b.?$"},
        ['"abcb"', '"cbx"'],
        ['"acbxx"', '"b"'],
    ),
    (
        "validation 6.4.1-2 items",
        {"type": "array", "minItems": 1, "maxItems": 2},
        ["[1]", '[1,"a"]'],
        ["[]", "[1,2,3]"],
    ),
    (
        "validation 6.5.3 required",
        PERSON,
        ['{"name":"Ann"}', '{"name":"Ann","age":130}'],
        ["{}", '{"age":3}', '{"name":"Ann","age":131}'],
    ),
    (
        "core 10.3.2.3 additional",
        PERSON,
        ['{"name":""}'],
        ['{"name":"Ann","x":1}', '{"name":"too long"}', '{"name":1}'],
    ),
    (
        "core 10.3.1.1 prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
        ["[]", "[1,null]"],
        ["[null]", "[1,2]"],
    ),
    (
        "core 10.2.1.1 allOf",
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
        ["3", "5"],
        ["2", "6", '"a"'],
    ),
    (
        "core 10.2.1.2 anyOf",
        {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]},
        ['"a"', "77"],
        ['"ab"', "null"],
    ),
    ("core 10.2.1.3 oneOf", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"ab"', "7"], ["null", "1.5"]),
    ("core 8.2.3.1 $ref", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, ["null"], ["0", "{}"]),
    (
        "core 8.2.3.1 recursion",
        TREE,
        ['{"v":1,"kids":[{"v":2,"kids":[{"v":3}]}]}'],
        ['{"v":1,"kids":[{"v":2,"kids":[{}]}]}', '{"v":1,"kids":{}}'],
    ),
    ("core 8.2.2 $anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "boolean"}}}, ["true"], ["0"]),
    ("validation 7.3.1 date", {"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"24-1-1"']),
    (
        "core 4.3.2 true",
        True,
        ["1", '"x"', "[[]]", '{"a":{}}', "null", "-1.5e3"],
        ["[1,]", "{a:1}", "nul", "'x'", "[1"],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_instances(grammar, any_spelling, tokenizer, walker, json_schema, schema, valid, invalid):
    matchers = [(grammar.compile(json_schema(schema)), tokenizer.encode)]
    matchers.append((any_spelling.compile(json_schema(schema)), tokenizer.encode_bytes))
    for matcher, encode in matchers:
        assert [text for text in valid if not walker.matches(matcher, encode(text))] == []
        assert [text for text in invalid if walker.matches(matcher, encode(text))] == []


@pytest.mark.parametrize("schema", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_json_text_compiles_to_the_same_grammar(grammar, walker, json_schema, schema):
    schema = _bounded(schema)
    first, second = (grammar.compile(json_schema(value)) for value in (schema, json.dumps(schema, indent=2)))
    for token_id in walker.generate(first, random.Random(8), wanted=0):
        assert second.accept(token_id)
    assert walker.open_ids(first) == walker.open_ids(second)


@pytest.mark.parametrize(("section", "schema"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_text_made_from_masks_is_valid(grammar, tokenizer, walker, json_schema, section, schema):
    """It is JSON, another compilation with the other masks takes it too, and a person has what a person must have."""
    generator = random.Random(section)
    for _ in range(3):
        text = tokenizer.decode(walker.generate(grammar.compile(json_schema(_bounded(schema))), generator, wanted=0))
        value = json.loads(text)
        assert walker.matches(grammar.compile(json_schema(schema)), tokenizer.encode(text))
        if schema is PERSON:
            assert set(value) <= {"name", "age"}
            assert len(value["name"]) <= 6
            assert 0 <= value.get("age", 0) <= 130


def _bounded(schema):
    """The schema, or a part of it whose texts are short enough to be met at random."""
    return {"type": ["integer", "null"]} if schema is True else {"maxItems": 2, "maxLength": 12, **schema}


@pytest.mark.parametrize(("limit", "texts"), [
    (0, {'{"a":[1,2]}': True, '{"a": [1,2]}': False, '{"a":[1, 2]}': False}),
    (2, {'{"a":[1,2]}': True, '{  "a" :\n\t[1,  2]}': True, '{"a":   [1,2]}': False, '{"a":[1,\n\n\n2]}': False}),
    (8, {'{"a":[1,\n        2]}': False, '{"a":[1,\n       2]}': True}),
])  # fmt: skip
def test_white_space_is_bounded(make_grammar, tokenizer, walker, json_schema, limit, texts):
    for canonical in (True, False):
        matcher = make_grammar(max_whitespace=limit, canonical=canonical).compile(json_schema({"type": "object"}))
        for text, expected in texts.items():
            assert walker.matches(matcher, tokenizer.encode_bytes(text)) is expected
            assert walker.matches(matcher, tokenizer.encode(text)) is expected


@pytest.mark.parametrize("text", [" 1", "\n{}", "1 ", "{}\n"])
def test_no_white_space_around_the_value(any_spelling, tokenizer, walker, json_schema, text):
    assert not walker.matches(any_spelling.compile(json_schema(True)), tokenizer.encode_bytes(text))


def test_any_character_may_be_escaped(any_spelling, tokenizer, walker, json_schema):
    """RFC 8259 section 7: every character may be written as \\uXXXX."""
    matcher = any_spelling.compile(json_schema({"type": "string"}))
    for text in ('"\\u0041"', '"\\n\\t\\\\\\""', '"\\u00e9"'):
        assert walker.matches(matcher, tokenizer.encode_bytes(text))
    for text in ('"\\x41"', '"\\u00"', '"\n"', '"\x00"'):
        assert not walker.matches(matcher, tokenizer.encode_bytes(text))


def test_a_thousand_optional_keys(grammar, tokenizer, walker, json_schema):
    """llguidance's own limit ends such a text in its middle."""
    properties = {f"k{index:03}": {"type": "null"} for index in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    matcher = grammar.compile(json_schema(schema))
    text = json.dumps({"k000": None, "k500": None, "k999": None}, separators=(",", ":"))
    assert walker.matches(matcher, tokenizer.encode(text))
