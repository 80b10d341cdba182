"""What is refused, with which words: specs before and while compiling, and grammars that break down while running."""

from __future__ import annotations

import json
import logging

import pytest

from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.sampling_params import GrammarSpec


def nested(depth: int, text: bool) -> object:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return '{"items":' * depth + "{}" + "}" * depth if text else schema


# (kind, value, what the message must say)
REFUSED = [
    ("ebnf", "root ::= x", "unknown kind 'ebnf'; 'llguidance' knows json_schema, regex"),
    ("regex", 3, "expected a string, not int"),
    ("regex", "a(", "unclosed group"),
    ("regex", "a\ud800b", "a lone surrogate is no character"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", r"[^\s\S]", "no text can match"),
    ("json_schema", 3, "expected a schema object, its JSON text or true, not int"),
    ("json_schema", False, "false matches nothing"),
    ("json_schema", "false", "false matches nothing"),
    ("json_schema", "{oops", "not JSON"),
    ("json_schema", "[]", "not list"),
    ("json_schema", {"const": float("nan")}, "not JSON"),
    ("json_schema", {"const": {1, 2}}, "not JSON"),
    ("json_schema", nested(100_000, text=True), "over the limit of 262144"),
    ("json_schema", nested(20_000, text=True), "nested too deeply"),
    ("json_schema", nested(500, text=True), "deeper than 100 levels"),
    ("json_schema", nested(500, text=False), "deeper than 100 levels"),
    ("json_schema", {"enum": ["x" * 300_000]}, "over the limit of 262144"),
    (
        "json_schema",
        {"properties": {"a": {"not": {"type": "null"}}}},
        'Unimplemented keys: ["not"] at #/properties/a/not',
    ),
    ("json_schema", {"items": {"type": "strng"}}, "Invalid type: strng at #/items/type"),
    ("json_schema", {"items": {"format": "nope"}}, "Unknown format: nope at #/items/format"),
    ("json_schema", {"type": "string", "pattern": "(?!a)"}, "look-around"),
    (
        "json_schema",
        {"properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}},
        "use anyOf at #/properties/a/oneOf",
    ),
    ("json_schema", {"$ref": "http://example.com/schema"}, "http://example.com/schema"),
    ("json_schema", {"$ref": "#/$defs/nothing"}, "/$defs/nothing"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ("json_schema", {"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
    (
        "json_schema",
        {"properties": {"id": {"maximum": 987654321098765432}}},
        "at #/properties/id/maximum is beyond ±2^53",
    ),
    ("json_schema", {"enum": [1, -(2**53) - 1]}, "at #/enum/1 is beyond ±2^53"),
    ("json_schema", {"$ref": "#"}, "the reference at # leads back to itself"),
    ("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}', "leads back to itself"),
]


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_refused_in_one_line(grammar, any_spelling, kind, value, message):
    for component in (grammar, any_spelling):
        with pytest.raises(RequestError) as caught:
            component.compile(GrammarSpec(kind=kind, value=value))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_other_requests_are_unaffected(grammar, walker, regex):
    before = walker.row(grammar.compile(regex("ab")))
    with pytest.raises(RequestError):
        grammar.compile(regex("a("))
    assert (walker.row(grammar.compile(regex("ab"))) == before).all()


@pytest.mark.parametrize("canonical", [True, False])
def test_a_schema_cannot_change_the_options(make_grammar, tokenizer, walker, json_schema, canonical):
    options = {"whitespace_flexible": True, "whitespace_pattern": "x", "item_separator": ";", "lenient": True}
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": options}
    matcher = make_grammar(canonical=canonical, max_whitespace=0).compile(json_schema(schema))
    assert walker.matches(matcher, tokenizer.encode_bytes("[1,2]"))
    for text in ("[1;2]", "[1, 2]", "[1,x2]"):
        assert not walker.matches(matcher, tokenizer.encode_bytes(text))


def test_a_property_may_be_named_like_an_option(any_spelling, tokenizer, walker, json_schema):
    schema = {"type": "object", "properties": {"x-guidance": {"type": "null"}}, "additionalProperties": False}
    matcher = any_spelling.compile(json_schema({**schema, "required": ["x-guidance"]}))
    assert walker.matches(matcher, tokenizer.encode_bytes('{"x-guidance":null}'))
    assert not walker.matches(matcher, tokenizer.encode_bytes("{}"))


def test_lenient_drops_and_says_so(make_grammar, tokenizer, walker, json_schema, caplog):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    grammar = make_grammar(lenient=True)
    with caplog.at_level(logging.WARNING):
        matcher = grammar.compile(json_schema(schema))
    assert "uniqueItems" in caplog.text
    assert walker.matches(matcher, tokenizer.encode("[1,1]"))
    assert not walker.matches(matcher, tokenizer.encode("[3]"))


def test_limits_are_the_configs(make_grammar, json_schema, regex):
    grammar = make_grammar(max_source_bytes=20, max_nesting=2)
    grammar.compile(json_schema({"items": {}}))
    grammar.compile(regex("a" * 20))
    with pytest.raises(RequestError, match="21 bytes are over the limit of 20"):
        grammar.compile(regex("a" * 21))
    with pytest.raises(RequestError, match="22 bytes"):
        grammar.compile(regex("é" * 11))
    with pytest.raises(RequestError, match="deeper than 2 levels"):
        grammar.compile(json_schema({"not": {"not": {}}}))
    with pytest.raises(RequestError, match="bytes are over"):
        grammar.compile(json_schema({"const": "x" * 20}))


def test_a_run_time_limit_is_a_failure_not_an_end(grammar, tokenizer, walker, regex):
    """llguidance would go on with a mask of EOS alone, as if the text were complete."""
    matcher = grammar.compile(regex("(.{1,500}){1,500}z"))
    letter = tokenizer.encode_bytes("q")[0]

    def run() -> None:
        for _ in range(500):
            assert not walker.open_ids(matcher) & {0, 1}
            assert matcher.accept(letter)

    with pytest.raises(
        ComponentFailure, match=r"grammar 'llguidance' stopped: lexer error: too many expressions"
    ) as caught:
        run()
    assert "\n" not in str(caught.value)
    with pytest.raises(ComponentFailure):
        walker.row(matcher)


def test_exact_integers_are_exact(any_spelling, tokenizer, walker, json_schema):
    matcher = any_spelling.compile(json_schema({"type": "integer", "minimum": 0, "maximum": 2**53}))
    assert walker.matches(matcher, tokenizer.encode_bytes(str(2**53)))
    assert not walker.matches(matcher, tokenizer.encode_bytes(str(2**53 + 1)))
    matcher = any_spelling.compile(json_schema({"const": 2**53}))
    assert walker.matches(matcher, tokenizer.encode_bytes(json.dumps(2**53)))
