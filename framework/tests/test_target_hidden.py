"""Hidden states between steps: which rows are given, and that none is lost on the way."""

from __future__ import annotations

import torch

from pluglm.kernel.core import Segment
from pluglm.target.hidden import HiddenStates


def computed(states: HiddenStates, start: int, stop: int, value: float = 0.0) -> None:
    """A step of one sequence at positions start .. stop, whose states are their positions, and `value`."""
    segment = Segment(sequence_id=3, query_start=0, num_query=stop - start, num_context=start, block_table=())
    rows_TD = torch.tensor([[position, value] for position in range(start, stop)])
    states.note([segment], rows_TD)


def taken(states: HiddenStates, stop: int) -> list[list[float]] | None:
    """Position by position, with the start that is stated."""
    found = states.take(3, stop)
    if found is None:
        return None
    assert found.rows_nD[0, 0] == found.start
    rows: list[list[float]] = found.rows_nD.tolist()
    return rows


def test_rows_are_given_once() -> None:
    states = HiddenStates()
    computed(states, 0, 2)
    computed(states, 2, 3)
    assert taken(states, 3) == [[0, 0], [1, 0], [2, 0]]
    assert taken(states, 3) is None


def test_rows_that_were_not_asked_for_stay() -> None:
    states = HiddenStates()
    computed(states, 0, 5)
    assert taken(states, 2) == [[0, 0], [1, 0]]
    assert taken(states, 2) is None
    computed(states, 5, 6)
    assert taken(states, 6) == [[2, 0], [3, 0], [4, 0], [5, 0]]


def test_a_stop_that_is_not_reached_loses_nothing() -> None:
    states = HiddenStates()
    computed(states, 4, 7)
    assert taken(states, 8) is None
    assert taken(states, 4) is None
    computed(states, 7, 8)
    assert taken(states, 8) == [[4, 0], [5, 0], [6, 0], [7, 0]]


def test_refused_drafts_are_replaced() -> None:
    """Positions 3 and 4 were drafts: the next step begins at 3 again."""
    states = HiddenStates()
    computed(states, 0, 5)
    assert taken(states, 3) == [[0, 0], [1, 0], [2, 0]]
    computed(states, 3, 6, value=1)
    assert taken(states, 5) == [[3, 1], [4, 1]]
    computed(states, 9, 10)  # behind a gap: what was adopted has no states
    assert taken(states, 10) == [[9, 0]]
