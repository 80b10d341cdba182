"""Classes of confidence: longer contexts are never in a lower class, and a kept draft is context of the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.contexts import LEAST, PRIORS, kinds_of


@given(st.integers(1, 40), st.integers(0, 12))
def test_each_draft_has_the_class_of_a_longer_context(num_context, num_drafts):
    kinds = kinds_of(num_context, num_drafts)
    assert kinds == [kinds_of(num_context + place, 1)[0] for place in range(num_drafts)]
    assert kinds == sorted(kinds)
    ends = [*LEAST[1:], float("inf")]
    assert all(LEAST[kind] <= num_context + place < ends[kind] for place, kind in enumerate(kinds))


def test_only_the_first_draft_is_in_doubt_when_the_text_went_on_in_several_ways():
    assert kinds_of(5, 3, is_unanimous=False) == [0, *kinds_of(6, 2)]
    assert kinds_of(5, 0, is_unanimous=False) == []


def test_what_is_assumed_rises_with_the_context():
    assert len(PRIORS) == len(LEAST)
    assert list(PRIORS) == sorted(PRIORS)
