"""The ngram drafter: worked examples of prompt lookup, and its index against the plain search on random histories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm.testing.drafter import draft_request, ids_of
from pluglm_spec_decode.ngram import NgramConfig, NgramDrafter
from pluglm_spec_decode.ngram_search import NgramIndex, plain_search


def propose(drafter: NgramDrafter, token_ids: list[int], max_tokens: int = 99, sequence_id: int = 0) -> list[int]:
    return drafter.propose([draft_request(token_ids, sequence_id=sequence_id, max_tokens=max_tokens)])[0].token_ids


# Worked by hand: (text, num_tokens, max_ngram, min_ngram) -> proposal
EXAMPLES = [
    ([1, 2, 3, 4, 9, 1, 2], 3, 3, 1, [3, 4, 9]),  # the pair 1 2 occurred at the start
    ([5, 2, 7, 1, 2, 8, 4, 1, 2], 2, 3, 1, [8, 4]),  # 1 2 beats the other 2
    ([2, 7, 2, 8, 2], 1, 3, 1, [8]),  # the latest earlier occurrence
    ([1, 2, 3, 1, 2], 9, 3, 1, [3, 1, 2]),  # what followed ends with the text
    ([4, 4, 4, 4], 2, 3, 1, [4]),  # an occurrence may overlap the suffix
    ([1, 2, 3], 4, 3, 1, []),
    ([1, 2, 9, 2], 4, 3, 2, []),  # one common token is less than min_ngram
    ([7], 4, 3, 1, []),
    ([], 4, 3, 1, []),
]


@pytest.mark.parametrize(("text", "num", "most", "least", "expected"), EXAMPLES)
def test_worked_examples(plain_context, text, num, most, least, expected):
    assert plain_search(text, num, most, least) == expected
    drafter = NgramDrafter(NgramConfig(num_tokens=num, max_ngram=most, min_ngram=least), plain_context)
    assert propose(drafter, text) == expected


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=8),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    num=st.integers(1, 6),
)
def test_index_equals_plain_search_while_the_text_grows(pieces, sizes, num):
    index, text = NgramIndex(max(sizes), min(sizes)), []
    for piece in pieces:
        text = text + piece
        expected = plain_search(text, num, max(sizes), min(sizes))
        assert index.search(text, num) == expected
        assert index.search(text, num) == expected


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=2, max_size=6))
def test_a_shorter_text_starts_afresh(texts):
    """Each text is shorter than the one before, as after a restart without release."""
    index = NgramIndex(3, 1)
    for text in sorted(texts, key=len, reverse=True):
        padded = text[: max(0, len(text) - 1)]
        index.search([9, *text, *text], 4)
        assert index.search(padded, 4) == plain_search(padded, 4, 3, 1)


def test_sequences_do_not_mix_and_release_forgets(plain_context):
    generator = random.Random(1)
    drafter = NgramDrafter(NgramConfig(), plain_context)
    texts: dict[int, list[int]] = {}
    for _ in range(300):
        chosen = generator.sample(range(5), 3)
        for sequence_id in chosen:
            if generator.random() < 0.1:
                drafter.release(sequence_id)
                drafter.release(sequence_id)
                texts.pop(sequence_id, None)
            texts.setdefault(sequence_id, []).extend(generator.choices(range(3), k=generator.randint(1, 4)))
        limits = [generator.randint(0, 6) for _ in chosen]
        requests = [
            draft_request(texts[sequence_id], sequence_id=sequence_id, max_tokens=limit)
            for sequence_id, limit in zip(chosen, limits, strict=True)
        ]
        expected = [
            plain_search(texts[sequence_id], min(4, limit), 3, 1) if limit else []
            for sequence_id, limit in zip(chosen, limits, strict=True)
        ]
        assert ids_of(drafter.propose(requests)) == expected
        for sequence_id in chosen:
            drafter.observe(sequence_id, 0, texts[sequence_id][-1:])


def test_no_more_than_asked_for(plain_context):
    drafter = NgramDrafter(NgramConfig(num_tokens=3), plain_context)
    text = [1, 2, 3, 4, 5, 6, 1]
    assert [propose(drafter, text, max_tokens) for max_tokens in (0, 1, 2, 3, 9)] == [
        [], [2], [2, 3], [2, 3, 4], [2, 3, 4],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": 0}, {"num_tokens": 33}, {"min_ngram": 4}, {"max_ngram": 0}, {"size": 3}], ids=str
)
def test_wrong_config_is_refused(wrong):
    with pytest.raises(ValidationError):
        NgramConfig.model_validate(wrong)
