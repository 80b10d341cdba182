"""Counts of windows and the rates of speculation, against numbers worked out by hand and a window-by-window count."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pluglm.verification.counts import SpeculationCounts

WINDOWS = st.lists(
    st.integers(0, 5)
    .flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    .flatmap(lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(max(1, pair[1]), pair[1] + 1))),
    max_size=12,
)


def counts_of(*windows: tuple[int, int, int]) -> SpeculationCounts:
    return SpeculationCounts.of([Counter(windows)])


def test_by_hand() -> None:
    """1 token of the prompt's last step, 3 of 3 drafts and 1, 1 of 3 and 1, 0 of 2 and 1, 1 of 2 and then a stop."""
    counts = counts_of((0, 0, 1), (3, 3, 4), (3, 1, 2), (2, 0, 1), (2, 1, 1))
    assert (counts.num_windows, counts.num_tokens) == (5, 9)
    assert (counts.num_drafted, counts.num_accepted) == (10, 5)
    assert (counts.drafted_by_position, counts.accepted_by_position) == ((4, 4, 2), (3, 1, 1))
    assert (counts.tokens_per_step, counts.accepted_per_step) == (9 / 5, 1.0)
    assert counts.acceptance_by_position == (0.75, 0.25, 0.5)


def test_without_windows_and_without_drafts() -> None:
    nothing, plain = SpeculationCounts(), counts_of((0, 0, 1), (0, 0, 1))
    assert (nothing.tokens_per_step, nothing.accepted_per_step, nothing.acceptance_by_position) == (None, None, ())
    assert (plain.tokens_per_step, plain.accepted_per_step, plain.acceptance_by_position) == (1.0, 0.0, ())
    assert SpeculationCounts.of([]) == nothing
    assert SpeculationCounts(drafted_by_position=(2, 0), accepted_by_position=(1, 0)).acceptance_by_position == (
        0.5,
        None,
    )


def test_json_has_counts_and_rates() -> None:
    counts = counts_of((0, 0, 1), (2, 1, 2))
    assert json.loads(json.dumps(counts.to_json(), allow_nan=False)) == {
        "num_windows": 2,
        "num_tokens": 3,
        "tokens_per_step": 1.5,
        "accepted_per_step": 0.5,
        "drafted_by_position": [1, 1],
        "accepted_by_position": [1, 0],
        "acceptance_by_position": [1.0, 0.0],
    }
    assert json.loads(json.dumps(SpeculationCounts().to_json()))["tokens_per_step"] is None


@given(WINDOWS, WINDOWS)
def test_every_window_counts_once(one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]) -> None:
    """Sequences of a request, and requests of a run, add up; each position by going over all windows."""
    windows = one + other
    together = SpeculationCounts.of([Counter(one), Counter(other)])
    assert together == counts_of(*one) + counts_of(*other) == sum([counts_of(*one), counts_of(*other)], counts_of())
    places = range(max((drafted for drafted, _, _ in windows), default=0))
    assert together.drafted_by_position == tuple(
        len([1 for window in windows if window[0] > place]) for place in places
    )
    assert together.accepted_by_position == tuple(
        len([1 for window in windows if window[1] > place]) for place in places
    )
    assert together.num_drafted == sum(window[0] for window in windows)
    assert together.num_accepted == sum(window[1] for window in windows)
    assert (together.num_windows, together.num_tokens) == (len(windows), sum(window[2] for window in windows))
