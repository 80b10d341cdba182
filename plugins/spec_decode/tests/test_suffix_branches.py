"""Branches of the suffix drafter: the runners-up at every place of its drafts, against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pluglm import PluglmError, RunConfig
from pluglm.assembly.resolving import resolve
from pluglm.testing.check import run_checks
from pluglm.testing.context import make_context
from pluglm.testing.drafter import draft_request, drafter_checks
from pluglm_spec_decode.suffix import SuffixConfig, SuffixDrafter

NUM_TOKENS, MAX_CONTEXT = 4, 6


def proposal(text, max_tokens=NUM_TOKENS, **fields):
    config = SuffixConfig(num_tokens=NUM_TOKENS, max_context=MAX_CONTEXT, shared_tokens=0, **fields)
    return SuffixDrafter(config, make_context()).propose([draft_request(text, max_tokens=max_tokens)])[0]


def followers(text, context):
    width = len(context)
    return [text[end] for end in range(width, len(text)) if text[end - width : end] == context]


def sizes(text, context):
    """Of the suffixes of a context that something followed, the longest first."""
    return [size for size in range(min(len(context), MAX_CONTEXT), 0, -1) if followers(text, context[-size:])]


def best(seen):
    """The token that followed most often, of equals the one that did so last; and its share."""
    count = max(map(seen.count, seen))
    return next(one for one in reversed(seen) if seen.count(one) == count), count / len(seen)


def continuation(text, context, num_tokens, least):
    """The likeliest way on, and the contexts and chances on it: before each token, the product of shares so far."""
    found, product, places = [], 1.0, []
    while len(found) < num_tokens and (known := sizes(text, context)):
        context = context[-known[0] :]
        token, share = best(followers(text, context))
        if product * share < least:
            break
        places.append((context, product, token))
        product *= share
        found.append(token)
        context = [*context, token]
    return found, sum(product * best(followers(text, one))[1] for one, product, _ in places), places


def chosen(text, tokens_per_match, least):
    """The continuation of most expected tokens, of equals that of the longest context."""
    choice, most = ([], 0.0, []), 0.0
    for size in sizes(text, text):
        allowed = min(NUM_TOKENS, max(1, int(tokens_per_match * size)))
        found = continuation(text, text[-size:], allowed, least)
        if found[1] > most + 1e-12:
            choice, most = found, found[1]
    return choice


def plain_branches(text, count, tokens_per_match, least):
    drafts, _, places = chosen(text, tokens_per_match, least)
    forks = []
    for place, (context, product, token) in enumerate(places):
        known = {token}
        for size in sizes(text, context):
            seen = followers(text, context[-size:])
            for other in set(seen) - known:
                chance = product * (seen.count(other) / len(seen))
                if chance >= least:
                    forks.append((-chance, place, other, [*context[-size:], other]))
            known |= set(seen)
    branches = []
    for chance, place, other, context in sorted(forks, key=lambda fork: fork[:3])[:count]:
        behind, _, _ = continuation(text, context, NUM_TOKENS - place - 1, least / -chance)
        branches.append([*drafts[:place], other, *behind])
    return branches


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.05, 0.3]),
)
def test_branches_are_the_runners_up(text, count, tokens_per_match, least):
    made = proposal(text, num_branches=count, tokens_per_match=tokens_per_match, min_probability=least)
    assert made.token_ids == chosen(text, tokens_per_match, least)[0]
    assert made.branches == plain_branches(text, count, tokens_per_match, least)


def test_branches_of_a_text_by_hand():
    """Behind 1 2 came 3 twice, and then 8 and 7; and 4 once."""
    made = proposal([1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 6, 1, 2], num_branches=2)
    assert made.token_ids == [3, 7, 1, 2]
    assert made.branches == [[4, 6, 1, 2], [3, 8, 1, 2]]


def test_drafts_are_the_same_with_branches_and_there_are_none_by_default():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    assert proposal(text).branches == []
    assert proposal(text, num_branches=3).token_ids == proposal(text).token_ids
    assert len(proposal(text, num_branches=3).branches) > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_way_is_longer_than_allowed(max_tokens):
    made = proposal([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], max_tokens, num_branches=4)
    assert made.branches
    assert max(map(len, made.branches)) <= max_tokens


def test_the_kit_passes():
    report = run_checks(drafter_checks(SuffixDrafter, SuffixConfig(num_branches=3)))
    assert report.ok, report


def test_branches_are_refused_where_they_do_not_pay(tmp_path):
    with pytest.raises(ValidationError, match="num_branches is for drafts of fixed length"):
        SuffixConfig(num_branches=2, adaptive=True)
    data = {
        "model": {"path": str(tmp_path), "dtype": "float32"},
        "backend": "cpu",
        "kv": "contiguous",
        "drafter": {"use": "suffix", "num_branches": 2},
    }
    with pytest.raises(PluglmError, match="each branch would copy all KV of its sequence"):
        resolve(RunConfig.from_dict(data))
    resolve(RunConfig.from_dict({**data, "drafter": "suffix"}))
