"""What numpy does on the host, row by row or for a batch, gives what torch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_cases import random_logits, row

from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm_samplers.drawing import draw, host_inverse_cdf, inverse_cdf, pick_best
from pluglm_samplers.randomness import Coins, Purpose, uniform
from pluglm_samplers.ranking import drop_below, keep_best, sort_best
from pluglm_samplers.top_p import keep_nucleus, nucleus_sizes

SIZES = (1, 5, 257, 5003)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_row_is_drawn_as_in_a_batch(vocab_size: int) -> None:
    probs_RV = torch.cat([random_logits(8, vocab_size, seed=seed).softmax(-1) for seed in range(6)])
    probs_RV[0] = torch.nan
    coins = np.random.default_rng(3).uniform(size=len(probs_RV)).tolist()
    coins[4:8] = [2.0**-53, 1 - 2.0**-53, 0.5, 0.25]
    expected = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64))
    drawn = [host_inverse_cdf(row_V, coin) for row_V, coin in zip(probs_RV.numpy(), coins, strict=True)]
    assert drawn[1:] == expected.tolist()[1:]
    assert 0 <= drawn[0] < vocab_size


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 1024])
def test_a_batch_is_drawn_as_torch_draws_it(vocab_size: int) -> None:
    logits_RV = torch.cat([random_logits(8, vocab_size, seed=seed) for seed in range(6)])
    rows = [row(seed=index) for index in range(len(logits_RV))]
    coins = np.random.default_rng(3).uniform(size=len(rows)).tolist()
    coins[4:8] = [2.0**-53, 1 - 2.0**-53, 0.5, 0.25]
    expected = inverse_cdf(logits_RV.softmax(-1), torch.tensor(coins, dtype=torch.float64))
    has_mass = (logits_RV > -torch.inf).any(-1).tolist()
    drawn = draw(logits_RV, rows, lambda seed, lane, position: coins[seed])
    assert drawn == [token if one else NO_TOKEN for token, one in zip(expected.tolist(), has_mass, strict=True)]


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.5, 0.95, 1 - 1e-9])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_nucleus_is_that_of_the_whole_ranking(vocab_size: int, top_p: float) -> None:
    for scale in (0.1, 1.0, 5.0):
        logits_RV = random_logits(8, vocab_size, seed=4) * scale
        sizes_R = nucleus_sizes(sort_best(logits_RV, vocab_size), [top_p] * len(logits_RV))
        expected_RV = keep_best(logits_RV.clone(), sizes_R)
        for row_V in logits_RV:
            keep_nucleus(row_V, top_p)
        assert torch.equal(logits_RV, expected_RV)


def test_a_nucleus_of_a_broken_row_is_left_to_whoever_draws() -> None:
    logits_V = torch.tensor([0.0, torch.nan, 1.0])
    keep_nucleus(logits_V, 0.5)
    assert bool(logits_V.isnan().any())


@pytest.mark.parametrize("vocab_size", SIZES)
def test_order_and_bounds_are_those_of_torch(vocab_size: int) -> None:
    logits_RV = random_logits(8, vocab_size, seed=5)
    for count in {1, max(1, vocab_size // 3), vocab_size}:
        assert torch.equal(sort_best(logits_RV, count), torch.topk(logits_RV, count).values)
    floor_R1 = logits_RV.amax(-1, keepdim=True) - 1
    expected_RV = logits_RV.masked_fill(logits_RV < floor_R1, -torch.inf)
    assert torch.equal(drop_below(logits_RV, floor_R1), expected_RV)


def test_the_best_is_the_first_of_equals_and_must_be_finite() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3, [0.0, torch.nan, 9.0], [0.0, torch.inf, 0.0]])
    assert pick_best(logits_RV) == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("first", [0, 60, 2**40 - 2, 2**64 - 70])
def test_remembered_coins_are_the_coins(first: int) -> None:
    coins = Coins(num_runs=2)
    for purpose in (Purpose.DRAW, Purpose.STEP):
        for position in range(first, first + 70):
            for lane in (0, 3):
                assert coins.uniform(2**64 - 1, lane, position, purpose) == uniform(2**64 - 1, lane, position, purpose)
