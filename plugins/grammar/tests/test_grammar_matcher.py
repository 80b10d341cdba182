"""The matcher's contract, checked on every token id of a small vocabulary: masks, accept, rollback, EOS, forced."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pluglm.kernel.errors import PluginError
from pluglm.kernel.sampling_params import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer"},
        "ok": {"enum": [True, None]},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec(kind="json_schema", value=PERSON),
    GrammarSpec(
        kind="json_schema", value={"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "null"}}}
    ),
    GrammarSpec(kind="regex", value="(name|nam|n+)( the cat){1,3}|[☃é]{2}x?"),
    GrammarSpec(kind="regex", value="true"),
]
EOS = frozenset({0, 1})


@pytest.fixture(params=[True, False], ids=["canonical", "any_spelling"])
def either(request, grammar, any_spelling):
    return grammar if request.param else any_spelling


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_accept_is_the_mask_for_every_id(either, walker, spec):
    generator = random.Random(1)
    matcher = either.compile(spec)
    for _ in range(25):
        before, allowed = walker.row(matcher), walker.open_ids(matcher)
        for token_id in range(-2, walker.num_ids + 40):
            if matcher.accept(token_id):
                assert token_id in allowed
                matcher.rollback(1)
            else:
                assert token_id not in allowed
        assert np.array_equal(walker.row(matcher), before)
        if matcher.terminated:
            assert not allowed
            return
        assert matcher.accept(generator.choice(sorted(allowed)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rollback_is_never_accepted(either, walker, spec):
    """Against fresh matchers that took only the tokens that remain, bit for bit, EOS among the tokens undone."""
    generator = random.Random(2)
    matcher = either.compile(spec)
    taken = [*walker.generate(matcher, generator, wanted=6), 1]
    assert matcher.accept(1)
    assert matcher.terminated
    for _ in range(12):
        keep = generator.randrange(len(taken) + 1)
        fresh = either.compile(spec)
        assert walker.num_accepted(fresh, taken[:keep]) == keep
        matcher.rollback(len(taken) - keep)
        assert np.array_equal(walker.row(matcher), walker.row(fresh))
        assert matcher.terminated is fresh.terminated
        assert matcher.forced() == fresh.forced()
        assert walker.num_accepted(matcher, taken[keep:]) == len(taken) - keep


def test_rollback_refuses_more_than_was_accepted(grammar, walker, regex):
    matcher = grammar.compile(regex("the cat"))
    assert walker.num_accepted(matcher, matcher.forced()) > 0
    before = walker.row(matcher)
    for count in (1000, -1):
        with pytest.raises(ValueError, match="cannot roll back"):
            matcher.rollback(count)
    assert np.array_equal(walker.row(matcher), before)


@pytest.mark.parametrize("pattern", ["ab?", "ab"], ids=["may go on", "complete"])
def test_eos_is_a_step_like_any_other(any_spelling, tokenizer, walker, regex, pattern):
    matcher = any_spelling.compile(regex(pattern))
    text = tokenizer.encode_bytes("ab")
    assert not matcher.accept(0)
    assert walker.num_accepted(matcher, text) == 2
    assert walker.open_ids(matcher) == EOS
    for eos in EOS:
        assert not matcher.terminated
        assert matcher.accept(eos)
        assert matcher.terminated
        assert walker.open_ids(matcher) == set()
        assert matcher.forced() == []
        assert not any(matcher.accept(token_id) for token_id in range(walker.num_ids))
        matcher.rollback(1)
    assert matcher.accept(0)
    matcher.rollback(2)
    assert walker.open_ids(matcher) == {text[1]} | (EOS if pattern == "ab?" else set())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_speculation_window(grammar, walker, spec):
    """Walk along a draft on the very matcher, undo, commit a shorter run: equal to a matcher that only saw that run."""
    generator = random.Random(3)
    draft = walker.generate(grammar.compile(spec), generator, wanted=5)
    matcher, plain = grammar.compile(spec), grammar.compile(spec)
    position = 0
    while position < len(draft):
        window = draft[position : position + 4]
        rows = []
        for token_id in window:
            rows.append(walker.row(matcher))
            assert matcher.accept(token_id)
        matcher.rollback(len(window))
        accepted = generator.randint(1, len(window))
        for row, token_id in zip(rows, window[:accepted], strict=False):
            assert np.array_equal(row, walker.row(plain))
            assert matcher.accept(token_id)
            assert plain.accept(token_id)
        position += accepted
    assert np.array_equal(walker.row(matcher), walker.row(plain))


def test_matchers_of_equal_specs_share_nothing(grammar, walker):
    first = grammar.compile(SPECS[0])
    before = walker.row(first)
    second = grammar.compile(SPECS[0].model_copy())
    walker.generate(second, random.Random(4), wanted=3)
    assert np.array_equal(walker.row(first), before)
    assert np.array_equal(walker.row(grammar.compile(SPECS[0])), before)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_cached_grammars_start_afresh(make_grammar, walker, size):
    grammar = make_grammar(cached_grammars=size)
    rows = [walker.row(grammar.compile(spec)) for spec in SPECS]
    for spec, row in zip(SPECS * 2, rows * 2, strict=True):
        matcher = grammar.compile(spec)
        assert np.array_equal(walker.row(matcher), row)
        walker.generate(matcher, random.Random(5), wanted=2)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_forced_tokens_are_the_only_ones(grammar, walker, spec):
    generator, num_forced = random.Random(6), 0
    matcher = grammar.compile(spec)
    while not matcher.terminated:
        before, forced = walker.row(matcher), matcher.forced()
        assert np.array_equal(walker.row(matcher), before)
        for token_id in forced:
            assert walker.open_ids(matcher) == {token_id}
            assert matcher.accept(token_id)
        num_forced += len(forced)
        assert matcher.accept(generator.choice(sorted(walker.open_ids(matcher))))
    assert num_forced > 0 or spec is not SPECS[3]


def test_special_and_padding_ids_stay_closed(any_spelling, tokenizer, walker, json_schema):
    """Inside a string every byte may come, but no control token and nothing beyond the tokenizer."""
    matcher = any_spelling.compile(json_schema({"type": "string"}))
    assert walker.num_accepted(matcher, tokenizer.encode_bytes('"<|tool')) == 7
    allowed = walker.open_ids(matcher)
    assert len(allowed) > 150
    assert not allowed & {0, 1, 2}
    assert max(allowed) < tokenizer.vocab_size


@pytest.mark.parametrize("row", [np.zeros(3, np.int32), np.zeros(12, np.int64), np.zeros((1, 12), np.int32)], ids=str)
def test_a_wrong_row_is_refused_and_untouched(grammar, regex, row):
    matcher = grammar.compile(regex("a"))
    with pytest.raises(ValueError, match="mask row must be int32"):
        matcher.fill_mask(row)
    assert not row.any()


def test_only_the_given_row_is_written(grammar, walker, regex):
    batch = np.full((12, 6), 7, dtype=np.int32).T[:, ::1]
    rows = np.full((3, 12), 7, dtype=np.int32)
    matcher = grammar.compile(regex("a"))
    matcher.fill_mask(rows[1])
    assert (rows[[0, 2]] == 7).all()
    assert np.array_equal(rows[1], walker.row(matcher))
    matcher.fill_mask(batch[2])  # not contiguous
    assert np.array_equal(batch[2], rows[1])
    assert (batch[[0, 1, 3, 4, 5]] == 7).all()


def test_head_narrower_than_the_tokenizer(make_grammar, tokenizer, walker, json_schema):
    num_ids = tokenizer.vocab_size - 30
    grammar = make_grammar(num_ids=num_ids)
    matcher = grammar.compile(json_schema({"type": "string"}))
    assert matcher.accept(tokenizer.encode_bytes('"')[0])
    row_W = np.zeros(-(-num_ids // 32), dtype=np.int32)
    matcher.fill_mask(row_W)
    bits = np.unpackbits(row_W.view(np.uint8), bitorder="little")
    assert bits[:num_ids].sum() > 100
    assert not bits[num_ids:].any()
    assert not matcher.accept(num_ids)


def test_an_ordinary_token_may_be_eos(make_grammar, tokenizer, walker, regex):
    """Then it ends the text wherever the grammar allows an end, and is never part of the text."""
    letter, other = tokenizer.encode_bytes("ba")
    matcher = make_grammar(eos=frozenset({letter}), canonical=False).compile(regex("a(b|a)a?"))
    assert matcher.accept(other)
    assert letter not in walker.open_ids(matcher)
    assert other in walker.open_ids(matcher)
    assert matcher.accept(other)
    assert matcher.accept(letter)
    assert matcher.terminated


def test_long_certain_text_is_forced_in_its_usual_tokens(grammar, tokenizer, walker, regex):
    """The tokenizer's own truncation (4 tokens here) plays no part; expected: the `tokenizers` library's own answer."""
    text = "the cat sat on the mat, the cat sat on the mat"
    matcher = grammar.compile(regex(text))
    expected = tokenizer.encode(text)
    assert len(expected) > 12
    assert matcher.forced() == expected
    assert walker.num_accepted(matcher, expected) == len(expected)
    assert walker.open_ids(matcher) == EOS


@pytest.mark.parametrize("eos", [frozenset(), frozenset({100_000}), frozenset({-1})], ids=str)
def test_no_usable_eos_is_refused(make_grammar, eos):
    with pytest.raises(PluginError, match="needs an EOS token"):
        make_grammar(eos=eos)


def test_unreadable_tokenizer_is_refused(make_grammar, tokenizer):
    class Broken:
        vocab_size = tokenizer.vocab_size

        def to_json(self) -> str:
            return '{"model": {"type": "NoSuchModel"}}'

    with pytest.raises(PluginError, match="cannot use this model's tokenizer"):
        make_grammar(view=Broken())
