"""Beam search by itself, on tables of probabilities: against enumeration of all outputs, and by hand.

Equality with transformers on models is tests/test_beam_equals_transformers.py's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.search import Hypothesis
from pluglm.testing.context import make_context
from pluglm_samplers.beam_search import BeamConfig, BeamSearch

EOS = 0
Path = tuple[int, ...]
Table = Callable[[Path], list[float]]  # output tokens of a lane -> probabilities of the next one


def beam(max_width: int = 1024) -> BeamSearch:
    return BeamSearch(BeamConfig(max_width=max_width), make_context(eos_token_ids=frozenset({EOS})))


def search(table: Table, n: int, max_tokens: int, ignore_eos: bool = False, **options: Any) -> list[Hypothesis]:
    """What the kernel does, without a kernel: it keeps the lanes, the walk says which."""
    walk = beam().start(options, n, max_tokens, ignore_eos)
    lanes: list[Path] = [()]
    while lanes:
        logprobs_LV = torch.tensor([table(lane) for lane in lanes]).log()
        lanes = [(*lanes[one.lane], one.token_id) for one in walk.advance(logprobs_LV)]
    return list(walk.results())


def random_table(seed: int, vocab_size: int) -> Table:
    known: dict[Path, list[float]] = {}
    generator = torch.Generator().manual_seed(seed)

    def row(path: Path) -> list[float]:
        if path not in known:
            probabilities: list[float] = torch.softmax(torch.randn(vocab_size, generator=generator) * 1.5, 0).tolist()
            known[path] = probabilities
        return known[path]

    return row


def outputs_of(table: Table, vocab_size: int, max_tokens: int, ignore_eos: bool) -> dict[Path, float]:
    """Every output that there is, with the sum of its log-probabilities in float64."""
    found: dict[Path, float] = {}
    for tokens in itertools.product(range(vocab_size), repeat=max_tokens):
        length = max_tokens if ignore_eos or EOS not in tokens else tokens.index(EOS) + 1
        path = tokens[:length]
        found[path] = sum(math.log(table(path[:index])[path[index]]) for index in range(length))
    return found


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [-1, 0, 1.0, 2.5])
@pytest.mark.parametrize(("vocab_size", "max_tokens"), [(2, 1), (2, 5), (3, 4), (5, 1), (5, 3), (7, 2)])
def test_a_beam_that_drops_nothing_finds_the_best_outputs(
    vocab_size: int, max_tokens: int, length_penalty: float, ignore_eos: bool
) -> None:
    """With V ** (L - 1) lanes nothing is lost before the last token, so the best of all V ** L outputs are found."""
    width = vocab_size ** (max_tokens - 1)
    for seed in range(3):
        table = random_table(seed, vocab_size)
        logprobs = outputs_of(table, vocab_size, max_tokens, ignore_eos)
        scores = {path: total / len(path) ** length_penalty for path, total in logprobs.items()}
        n = min(4, width)
        best = sorted(scores, key=lambda path: -scores[path])[:n]
        found = search(table, n, max_tokens, ignore_eos, width=width, length_penalty=length_penalty)
        assert [one.token_ids for one in found] == best
        assert [one.score for one in found] == pytest.approx([scores[path] for path in best], abs=1e-5)
        assert [one.stopped for one in found] == [path[-1] == EOS and not ignore_eos for path in best]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_width_one_is_greedy(length_penalty: float) -> None:
    endings = set()
    for seed in range(20):
        table, path = random_table(seed, 5), Path()
        while len(path) < 8 and EOS not in path:
            row = table(path)
            path = (*path, row.index(max(row)))
        (found,) = search(table, 1, 8, width=1, length_penalty=length_penalty)
        assert (found.token_ids, found.stopped) == (path, path[-1] == EOS)
        endings.add(found.stopped)
    assert endings == {False, True}


def by_hand(rows: Mapping[Path, list[float]]) -> Table:
    return lambda path: rows[path]


STOPPING = by_hand(
    {
        (): [0.4, 0.35, 0.25],
        (1,): [0.1, 0.8, 0.1],  # (1, 1) has 0.28
        (2,): [0.9, 0.05, 0.05],  # (2, EOS) has 0.225
        (1, 1): [1.0, 0.0, 0.0],
        (2, 1): [1.0, 0.0, 0.0],
        (1, 0): [1.0, 0.0, 0.0],
        (1, 2): [1.0, 0.0, 0.0],
    }
)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        # two hypotheses after two tokens; the lane (1, 1) with 0.28 can beat the worse of them, 0.225
        ({"length_penalty": 0.0}, [(0,), (1, 1, 0)]),
        ({"length_penalty": 0.0, "early_stopping": True}, [(0,), (2, 0)]),
        # divided by their lengths, ln 0.28 / 3 is even better than ln 0.4
        ({"length_penalty": 1.0}, [(1, 1, 0), (2, 0)]),
        ({"length_penalty": 1.0, "early_stopping": True}, [(2, 0), (0,)]),
        # times their lengths: -0.92, and -2.98 for (2, EOS), which (1, 1) at its present length beats with -2.55
        ({"length_penalty": -1.0}, [(0,), (2, 0)]),
    ],
)
def test_when_it_stops(options: dict[str, Any], best: list[Path]) -> None:
    assert [one.token_ids for one in search(STOPPING, 2, 6, width=2, **options)] == best


def test_an_end_that_is_not_among_the_best_candidates_is_no_hypothesis() -> None:
    """EOS is third of the first candidates, with 0.3; the best two outputs of two tokens have 0.216 and 0.204."""
    table = by_hand({(): [0.3, 0.36, 0.34], (1,): [0.0, 0.6, 0.4], (2,): [0.0, 0.6, 0.4]})
    assert [one.token_ids for one in search(table, 2, 2, width=2, length_penalty=0.0)] == [(1, 1), (2, 1)]
    assert [one.token_ids for one in search(table, 2, 2, width=3, length_penalty=0.0)] == [(0,), (1, 1)]


def test_ties_go_to_the_first_lane_and_the_lowest_id() -> None:
    even = [0.25] * 4
    walk = beam().start({"width": 3}, 3, 9, True)
    assert [one.token_id for one in walk.advance(torch.tensor([even]).log())] == [0, 1, 2]
    branches = walk.advance(torch.tensor([even] * 3).log())
    assert [(one.lane, one.token_id) for one in branches] == [(0, 0), (0, 1), (0, 2)]


def test_ids_without_a_probability_are_never_taken() -> None:
    """Three tokens and two steps: nine outputs in all, though there is room for sixteen."""
    found = search(lambda path: [0.5, 0.3, 0.2, 0.0], 9, 2, True, width=16)
    assert {one.token_ids for one in found} == set(itertools.product(range(3), repeat=2))


def test_more_outputs_than_exist_are_refused() -> None:
    with pytest.raises(RequestError, match="too few outputs: 2 of up to 1 tokens have a probability and n is 3"):
        search(lambda path: [0.5, 0.5, 0.0], 3, 1, width=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"search\.width must be an integer from 2 \(n\) to 16 \(max_width.*\), not None"),
        ({"width": 1}, r"search\.width must be an integer from 2 \(n\) to 16"),
        ({"width": 17}, "to 16.*, not 17"),
        ({"width": 4.0}, r"not 4\.0"),
        ({"width": True}, "not True"),
        ({"width": "4"}, "not '4'"),
        ({"width": 4, "length_penalty": "1"}, r"search\.length_penalty must be a number from -10 to 10, not '1'"),
        ({"width": 4, "length_penalty": math.nan}, "length_penalty.*not nan"),
        ({"width": 4, "length_penalty": math.inf}, "length_penalty.*not inf"),
        ({"width": 4, "length_penalty": True}, "length_penalty.*not True"),
        ({"width": 4, "length_penalty": None}, "length_penalty.*not None"),
        ({"width": 4, "early_stopping": "never"}, r"search\.early_stopping must be true or false, not 'never'"),
        ({"width": 4, "early_stopping": 1}, "early_stopping must be true or false, not 1"),
        ({"widht": 4}, "unknown option 'widht', did you mean 'width'.*early_stopping, length_penalty, width"),
        ({"width": 4, 3: 4}, "unknown option 3"),
    ],
)
def test_wrong_options_name_the_key_and_what_is_allowed(options: Any, says: str) -> None:
    problem = beam(max_width=16).check(options, 2)
    assert problem is not None
    assert "\n" not in problem
    assert re.search(says, problem)
    with pytest.raises(ValueError, match=says):
        beam(max_width=16).start(options, 2, 4, False)


def test_n_beyond_the_widest_beam_is_refused() -> None:
    problem = beam(max_width=4).check({"width": 4}, 5)
    assert problem == "n = 5 needs a search.width of as much, and at most 4 is allowed here"
    assert beam(max_width=4).check({"width": 4, "length_penalty": 2, "early_stopping": True}, 4) is None
