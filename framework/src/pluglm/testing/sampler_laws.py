"""The part of the sampler kit about distributions: single draws, and pairs of draws whose keys differ in one field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, ContractViolation, make_check
from pluglm.testing.statistics import cell_test

# V: vocabulary

Make = Callable[[int], Sampler]
NUM_DRAWS, NUM_PAIRS = 20_000, 5_000
DELTA = 1e-7  # per test; the kit makes eight, so a sound sampler fails it less than once in a million runs
WARM = SamplingParams(temperature=2.0)
PAIR_LOGITS = (1.0, 0.4, 0.0, -0.7, -1.5)


def law_checks(make: Make) -> Iterator[Check]:
    """The checks that need many draws."""
    checks = (draws_follow_the_softmax, lanes_are_independent, positions_are_independent, seeds_are_independent)
    for function in checks:
        yield make_check(function, make)


def _row(params: SamplingParams, seed: int, lane: int, position: int) -> SampleRow:
    return SampleRow(params=params, prompt_token_ids=(), output_token_ids=[], seed=seed, lane=lane, position=position)


def _draw(sampler: Sampler, logits: Sequence[float], rows: Sequence[SampleRow]) -> list[int]:
    with torch.inference_mode():
        return sampler.sample(torch.tensor([list(logits)]).repeat(len(rows), 1), rows)


def _softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    probabilities: list[float] = torch.softmax(torch.tensor(list(logits)).double() / temperature, 0).tolist()
    return probabilities


def _judge(ids: Sequence[int], probabilities: Sequence[float], what: str) -> None:
    counts = Counter(ids)
    problem = cell_test([counts[cell] for cell in range(len(probabilities))], probabilities, DELTA)
    if problem:
        raise ContractViolation(f"expected draws of {what} to follow their law, found {problem}")


def draws_follow_the_softmax(make: Make) -> None:
    """V = 17: a peaked row, a flat one and one with half of its tokens masked."""
    grid = torch.arange(17).float()
    peaked = (4.0 - grid * 0.6).tolist()
    masked = [float("-inf") if token % 2 else 0.1 * token for token in range(17)]
    params = SamplingParams()
    rows = [_row(params, 11, 0, position) for position in range(NUM_DRAWS)]
    for name, logits in (("a peaked row", peaked), ("a flat row", [0.0] * 17), ("a half masked row", masked)):
        _judge(_draw(make(17), logits, rows), _softmax(logits), name)


def temperature_divides_the_logits(make: Make) -> None:
    rows = [_row(WARM, 12, 0, position) for position in range(NUM_DRAWS)]
    logits = [1.5, 0.0, -1.0, 0.5]
    _judge(_draw(make(4), logits, rows), _softmax(logits, 2.0), "a row at temperature 2")


def _judge_pairs(make: Make, keys: Sequence[tuple[tuple[int, int, int], tuple[int, int, int]]], what: str) -> None:
    """keys: (seed, lane, position) of the two draws of each pair; their joint law must be the product."""
    sampler, params = make(5), SamplingParams()
    first = _draw(sampler, PAIR_LOGITS, [_row(params, *one) for one, _ in keys])
    second = _draw(sampler, PAIR_LOGITS, [_row(params, *two) for _, two in keys])
    law = _softmax(PAIR_LOGITS)
    joint = [p * q for p in law for q in law]
    _judge([one * 5 + two for one, two in zip(first, second, strict=True)], joint, what)


def lanes_are_independent(make: Make) -> None:
    _judge_pairs(make, [((21, 0, p), (21, 1, p)) for p in range(NUM_PAIRS)], "two lanes")


def positions_are_independent(make: Make) -> None:
    _judge_pairs(make, [((22, 0, 2 * p), (22, 0, 2 * p + 1)) for p in range(NUM_PAIRS)], "two positions")


def seeds_are_independent(make: Make) -> None:
    """Neighbouring seeds, and seeds that differ in the highest of their 64 bits only."""
    _judge_pairs(make, [((2 * s, 0, 5), (2 * s + 1, 0, 5)) for s in range(NUM_PAIRS)], "two seeds")
    high = 1 << 63
    _judge_pairs(make, [((s, 0, 5), (s + high, 0, 5)) for s in range(NUM_PAIRS)], "seeds that differ in bit 63")
