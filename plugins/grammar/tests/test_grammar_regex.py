"""Regexes against Python's `re`: whole texts, prefixes that can still be completed, and texts made from masks."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.sampling_params import GrammarSpec

ALPHABET = 'ab0 é"/\\'

# Patterns both dialects read alike; each with texts near its border.
CASES = [
    ("[0-9]{2,4}", ["1", "12", "1234", "12345", "12a", ""]),
    ("a|ab|abc", ["a", "ab", "abc", "abcd", ""]),
    ("(a+)+b", ["b", "ab", "aaaaaaaab", "aaaa"]),
    ("^the cat$", ["the cat", "the cat ", "he cat"]),
    ("(?:x*y)?", ["", "y", "xxy", "xx"]),
    (r"a/b\\\"c", ['a/b\\"c', 'a/b"c', "a/b"]),
    ("[^a-z]+", ["ABC", "é日", "aB", "☃\n"]),
    (".", ["x", "é", "\n", "日", "xx"]),
    (r"\w+@\w+\.(com|org)", ["a@b.com", "a@b.net", "é_1@x.org", "@b.com"]),
    ("caf[éè]{1,2}|日本?", ["café", "cafèé", "caf", "日", "日本", "本"]),
    ("a\x00b", ["a\x00b", "ab"]),
    (r"a\x00?", ["a\x00", "a", "\x00"]),
    ("(?i)Cat", ["cAT", "cat", "bat"]),
]


@pytest.mark.parametrize(("pattern", "texts"), CASES, ids=[repr(pattern) for pattern, _ in CASES])
def test_whole_texts_match_as_in_re(grammar, any_spelling, tokenizer, walker, regex, pattern, texts):
    usual, any_way = grammar.compile(regex(pattern)), any_spelling.compile(regex(pattern))
    generator = random.Random(pattern)
    outcomes = set()
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        outcomes.add(expected)
        assert walker.matches(usual, tokenizer.encode(text)) is expected
        assert walker.matches(any_way, tokenizer.encode_bytes(text)) is expected
        assert walker.matches(any_way, tokenizer.encode_anyhow(text, generator)) is expected
    assert outcomes == {True, False}


def test_every_prefix_of_a_finite_language(any_spelling, tokenizer, walker, regex):
    """A byte is open exactly when some text of the language goes on with it, found by listing all texts with `re`."""
    pattern = "(a|é)(b0){1,2}|ab?/|[a0]{3}"
    language = [text for text in _texts("ab0é/", 5) if re.fullmatch(pattern, text)]
    assert len(language) > 12
    for text in _texts("ab0é/", 3):
        matcher = any_spelling.compile(regex(pattern))
        data = text.encode()
        taken = walker.num_accepted(matcher, tokenizer.encode_bytes(text))
        reachable = max(n for n in range(len(data) + 1) if any(word.encode()[:n] == data[:n] for word in language))
        assert taken == reachable
        follow = {
            word.encode()[taken]
            for word in language
            if word.encode()[:taken] == data[:taken] and len(word.encode()) > taken
        }
        single = {byte for byte in range(256) if matcher.accept(_id(tokenizer, byte)) and matcher.rollback(1) is None}
        assert single == follow


def _texts(letters: str, length: int) -> list[str]:
    level, texts = [""], [""]
    for _ in range(length):
        level = [text + letter for text in level for letter in letters]
        texts += level
    return texts


def _id(tokenizer, byte: int) -> int:
    return tokenizer._ids[bytes([byte])]


def _patterns() -> st.SearchStrategy[str]:
    letters = st.sampled_from([re.escape(letter) for letter in ALPHABET] + ["[ab]", "[^a]", "[0-9é]"])
    return st.recursive(
        letters,
        lambda inner: st.one_of(
            st.builds("{}{}".format, inner, inner),
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])),
        ),
        max_leaves=6,
    )


@settings(max_examples=80, deadline=None)
@given(pattern=_patterns(), text=st.text(ALPHABET, max_size=6), seed=st.integers(0, 2**32))
def test_random_patterns(grammar, any_spelling, tokenizer, walker, pattern, text, seed):
    """A random text is taken as `re` says, and a text made from the masks always matches."""
    generator = random.Random(seed)
    spec = GrammarSpec(kind="regex", value=pattern)
    matcher = any_spelling.compile(spec)
    expected = re.fullmatch(pattern, text) is not None
    assert walker.matches(matcher, tokenizer.encode_anyhow(text, generator)) is expected
    for component in (grammar, any_spelling):
        token_ids = walker.generate(component.compile(spec), generator, wanted=3, favoured=pattern)
        assert re.fullmatch(pattern, tokenizer.decode(token_ids))


@pytest.mark.parametrize("pattern", ["[0-9]{2,4}", "(name|nam)( the cat){1,2}", "caf[éè]{1,2}|日本?", ""], ids=repr)
def test_texts_made_in_the_usual_spelling_are_taken_as_given(grammar, tokenizer, walker, regex, pattern):
    generator = random.Random(7)
    for _ in range(10):
        text = tokenizer.decode(walker.generate(grammar.compile(regex(pattern)), generator, wanted=4))
        assert walker.matches(grammar.compile(regex(pattern)), tokenizer.encode(text))
