"""The suffix drafter: what it proposes against a plain search, whom it shares with, and what it forgets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.testing.context import make_context
from pluglm.testing.drafter import draft_request
from pluglm_spec_decode.suffix import SuffixConfig, SuffixDrafter
from pluglm_spec_decode.suffix_automaton import SuffixAutomaton


def ids(drafter, sequence_id, text, num_prompt=None, max_tokens=99, **fields):
    prompt = tuple(text[: len(text) if num_prompt is None else num_prompt])
    request = draft_request(text, sequence_id=sequence_id, max_tokens=max_tokens, prompt_token_ids=prompt, **fields)
    return drafter.propose([request])[0].token_ids


def finish(drafter, sequence_id, prompt, output, **fields):
    """A request from its first draft to its end."""
    ids(drafter, sequence_id, prompt + output[:1], len(prompt), **fields)
    drafter.observe(sequence_id, 0, output[1:])
    drafter.release(sequence_id)


def followers(text, context):
    width = len(context)
    return [text[end] for end in range(width, len(text)) if text[end - width : end] == context]


def plain_continuation(text, context, num_tokens, max_context, min_probability):
    product, expected, found = 1.0, 0.0, []
    while len(found) < num_tokens:
        sizes = [size for size in range(min(len(context), max_context), 0, -1) if followers(text, context[-size:])]
        if not sizes:
            break
        seen = followers(text, context[-sizes[0] :])
        count = max(map(seen.count, seen))
        token = next(one for one in reversed(seen) if seen.count(one) == count)
        product *= count / len(seen)
        if product < min_probability:
            break
        found.append(token)
        expected += product
        context = [*context[-sizes[0] :], token]
    return found, expected


def plain_choice(text, num_tokens, max_context, tokens_per_match, min_probability):
    """Of every suffix the likeliest continuation; the one with most expected tokens, of equals the longest suffix's."""
    best, most = [], 0.0
    for size in range(min(len(text), max_context), 0, -1):
        if followers(text, text[-size:]):
            allowed = min(num_tokens, max(1, int(tokens_per_match * size)))
            found, expected = plain_continuation(text, text[-size:], allowed, max_context, min_probability)
            if expected > most + 1e-12:
                best, most = found, expected
    return best


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.4]),
)
def test_proposals_of_a_growing_text(pieces, max_context, tokens_per_match, min_probability):
    config = SuffixConfig(
        num_tokens=5, max_context=max_context, tokens_per_match=tokens_per_match, min_probability=min_probability
    )
    drafter, text = SuffixDrafter(config, make_context()), []
    for piece in pieces:
        text += piece
        expected = plain_choice(text, 5, max_context, tokens_per_match, min_probability)
        assert ids(drafter, 0, text) == expected
        drafter.observe(0, 0, piece)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_being_asked_before_for_another_number_changes_nothing(text, numbers):
    config = SuffixConfig(num_tokens=5, max_context=6, min_probability=0.2)
    drafter = SuffixDrafter(config, make_context())
    for number in numbers:
        alone = ids(SuffixDrafter(config, make_context()), 0, text, max_tokens=number)
        assert ids(drafter, 0, text, max_tokens=number) == alone


def test_adaptive_drafts_take_one_search(plain_context, monkeypatch):
    searched = []

    def continuation(automaton, *arguments):
        searched.append(arguments)
        return found(automaton, *arguments)

    found, counts, text = SuffixAutomaton.continuation, [], [1, 2, 3, 4, 5, 6, 1, 2]
    monkeypatch.setattr(SuffixAutomaton, "continuation", continuation)
    for fields in ({}, {"adaptive": True, "draft_cost": 0.0}):
        searched.clear()
        assert ids(SuffixDrafter(SuffixConfig(**fields), plain_context), 0, text) == [3, 4, 5, 6]
        counts.append(len(searched))
    assert counts[0] == counts[1] > 0


def test_an_output_that_ends_serves_a_text_that_was_searched_before(plain_context):
    drafter = SuffixDrafter(SuffixConfig(), plain_context)
    ids(drafter, 0, [1, 2, 40], 2)
    assert ids(drafter, 1, [9, 41], 1) == []
    drafter.observe(0, 0, [41, 42])
    drafter.release(0)
    assert ids(drafter, 1, [9, 41], 1) == [42]


def test_longer_matches_draft_more(plain_context):
    drafter = SuffixDrafter(SuffixConfig(num_tokens=32, tokens_per_match=2), plain_context)
    words = list(range(20, 60))
    for sequence_id, size in enumerate((1, 2, 5, 9)):
        text = [*words, 5, *words[:size]]
        assert ids(drafter, sequence_id, text) == words[size : size + 2 * size]


def test_past_outputs_serve_the_tenant_alone(plain_context):
    drafter = SuffixDrafter(SuffixConfig(), plain_context)
    prompt, output = [1, 2, 3], [40, 41, 42, 43, 44, 45, 46]
    finish(drafter, 0, prompt, output, tenant="a", salt="s")
    assert ids(drafter, 1, [7, 40, 41], 1, tenant="a", salt="s") == [42, 43, 44, 45]
    assert ids(drafter, 2, [7, 40, 41], 1, tenant="b", salt="s") == []
    assert ids(drafter, 3, [7, 40, 41], 1, tenant="a", salt="t") == []
    assert ids(drafter, 4, [7, 8, 1], 2, tenant="a", salt="s") == []  # prompts are not shared
    assert ids(drafter, 5, [7, 3], 1, tenant="a", salt="s") == []


def test_what_was_committed_last_is_kept_too(plain_context):
    """No request shows it any more: the sequence ends."""
    drafter = SuffixDrafter(SuffixConfig(), plain_context)
    ids(drafter, 0, [1, 2, 40], 2)
    drafter.observe(0, 0, [41])
    drafter.observe(0, 0, [42, 43])
    drafter.release(0)
    assert ids(drafter, 1, [9, 41], 1) == [42, 43]


def test_nothing_is_shared_on_request(plain_context):
    drafter = SuffixDrafter(SuffixConfig(shared_tokens=0), plain_context)
    finish(drafter, 0, [1, 2, 3], [40, 41, 42])
    assert ids(drafter, 1, [7, 40, 41], 1) == []


def test_shared_memory_is_bounded(plain_context):
    drafter, generator = SuffixDrafter(SuffixConfig(shared_tokens=2000), plain_context), random.Random(1)
    for number in range(100):
        output = [1000 * number + place for place in range(generator.randint(2, 120))]
        finish(drafter, number, [1], output, tenant=generator.choice("ab"))
        assert drafter.num_shared_tokens <= 2000
    assert drafter.num_shared_tokens > 1000


def test_a_shorter_text_begins_anew(plain_context):
    drafter = SuffixDrafter(SuffixConfig(), plain_context)
    assert ids(drafter, 0, [5, 6, 7, 5, 6]) == [7, 5, 6, 7]
    assert ids(drafter, 0, [8, 9, 8]) == [9, 8]


def test_no_more_than_asked_for(plain_context):
    drafter = SuffixDrafter(SuffixConfig(num_tokens=3), plain_context)
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert [ids(drafter, 0, text, max_tokens=most) for most in (0, 1, 2, 3, 9)] == [
        [],
        [3],
        [3, 4],
        [3, 4, 5],
        [3, 4, 5],
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"max_context": 0},
        {"tokens_per_match": 0},
        {"min_probability": 1.5},
        {"shared_tokens": -1},
        {"shared_tokens": 1},
        {"shared_tokens": 17},
    ],
    ids=str,
)
def test_wrong_config_is_refused(wrong):
    with pytest.raises(ValidationError):
        SuffixConfig.model_validate(wrong)
