"""The suffix automaton against a plain search of all occurrences, and the cost of a token by counting states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm_spec_decode.suffix_automaton import Context, SuffixAutomaton

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=4)


def followers(texts: list[list[int]], context: list[int]) -> list[int]:
    """Every token that stands behind the context, in the order of the texts."""
    size = len(context)
    return [text[end] for text in texts for end in range(size, len(text)) if size and text[end - size : end] == context]


def num_places(texts: list[list[int]], context: list[int]) -> int:
    size = len(context)
    return sum(text[end - size : end] == context for text in texts for end in range(size, len(text) + 1))


def longest_context(texts: list[list[int]], text: list[int], max_context: int) -> list[int]:
    for size in range(min(len(text), max_context), 0, -1):
        if followers(texts, text[-size:]):
            return text[-size:]
    return []


def plain_continuation(texts, context, num_tokens, min_probability, max_context):
    """The likeliest follower, of equals the one seen last, then what follows the longest context that it makes."""
    token_ids, product, expected = [], 1.0, 0.0
    while len(token_ids) < num_tokens and (context := longest_context(texts, context, max_context)):
        seen = followers(texts, context)
        most = max(seen.count(token) for token in seen)
        token = next(token for token in reversed(seen) if seen.count(token) == most)
        product *= most / len(seen)
        if product < min_probability:
            break
        token_ids.append(token)
        expected += product
        context = [*context, token]
    return token_ids, expected


def automaton_of(texts: list[list[int]], max_context: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_context)
    for text in texts:
        automaton.start_text()
        for token_id in text:
            automaton.append(token_id)
    return automaton


def check_contexts(automaton, texts, context: Context, text, max_context, min_probability=0.0):
    """The context is the longest, and every shorter one and every continuation is what the plain search finds."""
    expected = longest_context(texts, text, max_context)
    assert context.num_tokens == len(expected)
    while context.num_tokens:
        words = text[-context.num_tokens :]
        found = automaton.continuation(context, 6, min_probability)
        token_ids, sure = plain_continuation(texts, words, 6, min_probability, max_context)
        assert found.token_ids == token_ids
        assert found.expected == pytest.approx(sure)
        context = automaton.shorter(context)
        rarer = num_places(texts, words)
        more = [size for size in range(1, len(words)) if num_places(texts, words[-size:]) > rarer]
        assert context.num_tokens == max([size for size in more if followers(texts, words[-size:])], default=0)


@settings(max_examples=300)
@given(TEXTS, st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.6]))
def test_the_present_text(texts, max_context, min_probability):
    """After every token: the last of the texts grows while it is asked about."""
    automaton = SuffixAutomaton(max_context)
    for number, text in enumerate(texts):
        automaton.start_text()
        assert automaton.own_context() == Context(0, 0)
        for size, token_id in enumerate(text, start=1):
            automaton.append(token_id)
            known = [*texts[:number], text[:size]]
            check_contexts(automaton, known, automaton.own_context(), text[:size], max_context, min_probability)
    assert automaton.num_tokens == sum(map(len, texts))


@settings(max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 9))
def test_a_text_of_others(texts, text, max_context):
    automaton = automaton_of(texts, max_context)
    check_contexts(automaton, texts, automaton.context_of(text), text, max_context)


@pytest.mark.parametrize("text", [[7] * 3000, [1, 2] * 1500, list(range(3000)), ([1] * 40 + [2]) * 70], ids=str)
def test_the_size_is_linear(text):
    """At most 2n - 1 states and 3n - 4 transitions: the bounds of Blumer et al. (1985)."""
    automaton = automaton_of([text], 64)
    assert len(automaton._length) <= 2 * len(text) - 1 + 1  # and the root
    assert sum(map(len, automaton._next)) <= 3 * len(text) - 4


def test_a_period_is_continued_beyond_the_text():
    automaton = automaton_of([[5, 6, 7, 5, 6]], 32)
    assert automaton.continuation(automaton.own_context(), 8, 0.0) == ([7, 5, 6, 7, 5, 6, 7, 5], 8.0, 1.0)


def test_frequency_decides_then_the_latest():
    automaton = automaton_of([[5, 1, 5, 1, 5, 2], [5, 2, 9], [8, 3, 8, 4, 8]], 4)
    assert automaton.continuation(automaton.context_of([5]), 1, 0.0) == ([2], 0.5, 0.5)  # 1 and 2 twice, 2 the latest
    assert automaton.continuation(automaton.context_of([1, 5]), 1, 0.0) == ([2], 0.5, 0.5)
    assert automaton.continuation(automaton.context_of([8]), 1, 0.0) == ([4], 0.5, 0.5)
    assert automaton.continuation(automaton.context_of([5]), 2, 0.6) == ([], 0.0, 1.0)
    assert automaton.context_of([4, 7]) == Context(0, 0)
