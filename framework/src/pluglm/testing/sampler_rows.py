"""The part of the sampler kit about final rows: that they are what `sample` draws from, for each row by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.statistics import cell_test
from pluglm.verification.checking import problem_of_final_rows

# R: rows, V: vocabulary

Make = Callable[[int], Any]
WIDTH, NUM_DRAWS = 17, 5_000
TOLERANCE = 1e-6  # between a row in a batch and alone
DELTA = 1e-8  # of each test of draws; there are less than twenty
GREEDY = SamplingParams(temperature=0.0)
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"typical_p": 0.8},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": {3: 1.5, 4: -2.0}},
    {"bad_words_ids": ((3,), (5, 6))},
    {"min_tokens": 9},
    {"xtc_probability": 0.5},
)


def final_row_checks(make: Make, takes: Callable[[SamplingParams], bool]) -> Iterator[Check]:
    """Every check of a sampler of the tag FINAL_ROWS. takes: whether it can honour params, which others do not come."""
    shapes = [params for params in (SamplingParams(**fields) for fields in SHAPES) if takes(params)] or [GREEDY]
    for function in (
        final_rows_are_probabilities,
        greedy_rows_have_one_token,
        final_rows_are_independent,
        windows_equal_single_rows,
    ):
        yield make_check(function, make, shapes)
    if shapes != [GREEDY]:
        yield make_check(draws_follow_the_final_rows, make, shapes)


def _row(params: SamplingParams, position: int = 0, *, seed: int = 7, memory: Any = None) -> SampleRow:
    return SampleRow(
        params=params,
        prompt_token_ids=(1, 2),
        output_token_ids=[3, 5, 3, 6, 5, 3, 9, 5][:position],
        seed=seed,
        lane=0,
        position=position,
        memory=memory,
    )


def _logits(num_rows: int, seed: int) -> torch.Tensor:
    """Some ids masked."""
    logits_RV = 1.5 * torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    logits_RV[:, 11:13] = float("-inf")
    return logits_RV


def _final(sampler: Any, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """One call that leaves the caller's logits alone."""
    with torch.inference_mode():
        probs_RV: torch.Tensor = sampler.final_rows(logits_RV.clone(), rows)
    return probs_RV


def final_rows_are_probabilities(make: Make, shapes: Sequence[SamplingParams]) -> None:
    """float32, of sum 1, nothing on masked ids; all zero for a row without a token, and the others as without it."""
    sampler, rows = make(WIDTH), [_row(params, place % 5) for place, params in enumerate([*shapes, GREEDY])]
    logits_RV = _logits(len(rows), 1)
    whole_RV = _final(sampler, logits_RV, rows)
    problem = problem_of_final_rows(whole_RV, logits_RV)
    expect(problem is None, "final rows that can be drawn from", f"a sampler that {problem}")
    expect(bool((whole_RV.amax(-1) > 0).all()), "a token with a probability in each row", "a row of zeros")
    logits_RV[0] = float("-inf")
    found_RV = _final(sampler, logits_RV, rows)
    expect(not found_RV[0].any(), "a row of zeros where there is no token", found_RV[0].tolist())
    expect(torch.equal(found_RV[1:], whole_RV[1:]), "the other rows as before", "others")


def greedy_rows_have_one_token(make: Make, shapes: Sequence[SamplingParams]) -> None:
    """The one that `sample` takes, the lowest of equal ones."""
    sampler, logits_RV = make(WIDTH), _logits(20, 2).round()
    rows = [_row(GREEDY, place % 5) for place in range(20)]
    with torch.inference_mode():
        ids = sampler.sample(logits_RV.clone(), rows)
    expected_RV = torch.nn.functional.one_hot(torch.tensor(ids), WIDTH).float()
    found_RV = _final(sampler, logits_RV, rows)
    expect(torch.equal(found_RV, expected_RV), f"all of the probability on {ids}", found_RV.argmax(-1).tolist())


def final_rows_are_independent(make: Make, shapes: Sequence[SamplingParams]) -> None:
    """A row alone is what it is in a batch of other params, greedy ones among them."""
    sampler = make(WIDTH)
    rows = [_row(params, place % 5) for place, params in enumerate([*shapes, GREEDY, *shapes])]
    logits_RV = _logits(len(rows), 3)
    together_RV = _final(sampler, logits_RV, rows)
    for place, row in enumerate(rows):
        alone_RV = _final(sampler, logits_RV[place : place + 1], [row])
        error = float((alone_RV[0] - together_RV[place]).abs().max())
        changed = row.params.model_dump(exclude_defaults=True)
        expect(error <= TOLERANCE, f"a row under {changed} to be as it is alone", f"off by {error:.2g}")


def windows_equal_single_rows(make: Make, shapes: Sequence[SamplingParams]) -> None:
    """Five rows of one lane in one call, each behind the drafts before it, and in calls of their own, one by one."""
    for number, params in enumerate(shapes):
        logits_RV, window, single = _logits(5, 10 + number), dict[Any, Any](), dict[Any, Any]()
        together_RV = _final(make(WIDTH), logits_RV, [_row(params, place, memory=window) for place in range(2, 7)])
        sampler = make(WIDTH)
        for place in range(2, 7):
            alone_RV = _final(sampler, logits_RV[place - 2 : place - 1], [_row(params, place, memory=single)])
            error = float((alone_RV[0] - together_RV[place - 2]).abs().max())
            expect(error <= TOLERANCE, f"row {place - 2} of a window as it is by itself", f"off by {error:.2g}")


def draws_follow_the_final_rows(make: Make, shapes: Sequence[SamplingParams]) -> None:
    """The cell test of 5,000 draws under each of the params against the mean of their final rows, which coins of the
    sampler's steps may change from row to row."""
    for number, params in enumerate(shapes):
        sampler, rows = make(WIDTH), [_row(params, 3, seed=seed) for seed in range(NUM_DRAWS)]
        logits_RV = _logits(1, 30 + number).repeat(NUM_DRAWS, 1)
        mean = _final(sampler, logits_RV, rows).double().mean(0).tolist()
        with torch.inference_mode():
            counts = Counter(sampler.sample(logits_RV, rows))
        problem = cell_test([counts[token] for token in range(WIDTH)], mean, DELTA)
        changed = params.model_dump(exclude_defaults=True)
        expect(problem is None, f"draws from the final rows under {changed}", problem)
