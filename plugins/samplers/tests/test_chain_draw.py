"""The draw: its ends, its seeds, and that no neighbour, order or batch size can touch a row. The kit tests its law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sampler_cases import chain, random_logits, random_row, row

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.verification.drawing import inverse_cdf


@pytest.mark.parametrize("vocab_size", [5, 17, 1000, 40_001])
def test_rows_are_bitwise_independent_of_their_batch(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    num_rows = 24 if vocab_size < 2000 else 6
    rows = [
        replace(random_row(generator, vocab_size), seed=index % 5, lane=index % 3, position=index)
        for index in range(num_rows)
    ]
    rows[2] = replace(rows[2], params=SamplingParams(temperature=0.0, repetition_penalty=1.4))
    logits_RV = random_logits(num_rows, vocab_size, seed=9)
    sampler = chain(vocab_size)
    alone = [sampler.sample(logits_RV[index : index + 1].clone(), [rows[index]])[0] for index in range(num_rows)]
    order = generator.permutation(num_rows).tolist()
    shuffled = sampler.sample(logits_RV[order].clone(), [rows[index] for index in order])
    assert sampler.sample(logits_RV.clone(), rows) == alone
    assert shuffled == [alone[index] for index in order]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [17, 40_001])
def test_transformed_logits_are_bitwise_independent_of_their_batch(vocab_size: int, threads: int) -> None:
    generator = np.random.default_rng(vocab_size)
    rows = [random_row(generator, vocab_size) for _ in range(20)]
    logits_RV = random_logits(20, vocab_size, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in chain(vocab_size)._steps:
            active = [index for index, one in enumerate(rows) if step.is_active(one.params)]
            assert active
            many_RV = step.apply(logits_RV[active].clone(), [rows[index] for index in active])
            for place, index in enumerate(active):
                one_RV = step.apply(logits_RV[index : index + 1].clone(), [rows[index]])
                assert torch.equal(one_RV[0], many_RV[place])
    finally:
        torch.set_num_threads(before)


def test_seed_lane_and_position_each_change_the_draw_and_nothing_else_does() -> None:
    logits_RV = torch.zeros(1, 1000)

    def token(seed: int = 1, lane: int = 0, position: int = 0) -> int:
        return chain(1000).sample(logits_RV.clone(), [row(seed=seed, lane=lane, position=position)])[0]

    assert token() == token()
    for changed in ({"seed": 2}, {"lane": 1}, {"position": 1}):
        assert token(**changed) != token()


def test_inverse_cdf_at_the_ends_and_on_steps() -> None:
    # p = 0, 1/4, 1/2, 0, 1/4, 0: intervals [0, .25), [.25, .75), [.75, 1).
    probs_V = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0])
    coins = [2.0**-53, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53]
    drawn = inverse_cdf(probs_V.repeat(6, 1), torch.tensor(coins, dtype=torch.float64))
    assert drawn.tolist() == [1, 1, 2, 2, 4, 4]


def test_greedy_takes_the_lowest_of_the_best_and_truncation_cannot_move_it() -> None:
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.5)
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert chain(4).sample(logits_RV.clone(), [row(params)]) == [1]
    assert chain(4, steps=["top_k", "temperature"]).sample(logits_RV.clone(), [row(params)]) == [1]


def test_greedy_applies_penalties_before_temperature_only() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    one = row(params, prompt=(1,))
    logits_RV = torch.tensor([[1.0, 1.5, 0.2]])
    assert chain(3).sample(logits_RV.clone(), [one]) == [0]
    late = chain(3, steps=["temperature", "repetition_penalty"])
    assert late.sample(logits_RV.clone(), [one]) == [1]  # the limit of temperature 0: 0.5 / T is dwarfed


def test_top_k_one_equals_greedy() -> None:
    logits_RV = random_logits(64, 17, seed=5)
    greedy, one = (SamplingParams(temperature=0.0), SamplingParams(top_k=1, temperature=1.7))
    rows: list[SampleRow] = [row(one, seed=index) for index in range(64)]
    assert chain(17).sample(logits_RV.clone(), rows) == chain(17).sample(logits_RV.clone(), [row(greedy)] * 64)
