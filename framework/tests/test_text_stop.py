"""Stop strings against a brute-force search over the whole text, for every way to cut the text into pieces."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.errors import RequestError
from pluglm.text.stop import StopMatcher

LETTERS = st.text(alphabet="ab€", min_size=1, max_size=4)
STOPS = st.lists(LETTERS, max_size=4)
TEXT = st.text(alphabet="ab€", max_size=9)


def oracle(text: str, stop: list[str], include_stop: bool, first_end: int = 0) -> tuple[str, str | None]:
    """The definition: of all that end at first_end or later the one that ends first, of those the longest."""
    ends = [(start + len(s), -len(s), s) for s in stop for start in range(len(text)) if text.startswith(s, start)]
    ends = [one for one in ends if one[0] >= first_end]
    if not ends:
        return text, None
    end, _, found = min(ends)
    return text[: end if include_stop else end - len(found)], found


def longest_held(text: str, stop: list[str]) -> str:
    """The longest suffix of `text` that is a proper prefix of some stop string."""
    suffixes = (text[start:] for start in range(len(text) + 1))
    return next(s for s in suffixes if s == "" or any(full.startswith(s) and full != s for full in stop))


@settings(max_examples=150, deadline=None)
@given(text=TEXT, stop=STOPS, include_stop=st.booleans())
def test_every_chunking_gives_the_brute_force_cut(text: str, stop: list[str], include_stop: bool) -> None:
    expected = oracle(text, stop, include_stop)
    inner = range(1, len(text))
    for cuts in (c for n in range(min(len(text), 4)) for c in combinations(inner, n)):
        edges = [0, *cuts, len(text)]
        matcher = StopMatcher(stop, include_stop=include_stop)
        emitted = "".join(matcher.push(text[a:b])[0] for a, b in pairwise(edges))
        assert (emitted + matcher.flush(), matcher.matched) == expected


@settings(max_examples=150, deadline=None)
@given(text=TEXT, stop=STOPS)
def test_nothing_is_held_beyond_a_possible_stop(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    emitted = ""
    for end, character in enumerate(text, start=1):
        piece, matched = matcher.push(character)
        emitted += piece
        if matched is not None:
            return
        assert matcher.held == longest_held(text[:end], stop)
        assert emitted + matcher.held == text[:end]


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stop=STOPS, include_stop=st.booleans(), num_before=st.integers(0, 9))
def test_a_stop_completed_too_early_is_text(text: str, stop: list[str], include_stop: bool, num_before: int) -> None:
    """It may begin anywhere. What did not count is held back no longer than other text."""
    matcher = StopMatcher(stop, include_stop=include_stop)
    emitted = ""
    for end, character in enumerate(text, start=1):
        emitted += matcher.push(character, may_stop=end > num_before)[0]
        if matcher.matched is None:
            assert matcher.held == longest_held(text[:end], stop)
    assert (emitted + matcher.flush(), matcher.matched) == oracle(text, stop, include_stop, first_end=num_before + 1)


def test_the_first_completed_wins_over_the_first_started() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")


def test_of_two_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["c", "abc"]).push("xabc") == ("x", "abc")


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("a EN") == ("a ", None)
    assert matcher.push("D b") == ("END", "END")
    assert matcher.push("c") == ("", "END")
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], "abc"])
def test_wrong_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop is"):
        StopMatcher(stop)
