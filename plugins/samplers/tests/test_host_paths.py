"""What numpy does on the host, row by row or for a batch, gives what torch gives elsewhere."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from sampler_cases import random_logits, random_params, row, step

from pluglm.assembly.registry import list_entries
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.verification.drawing import inverse_cdf
from pluglm.verification.randomness import Coins, Purpose, uniform
from pluglm_samplers.blocks import few_live, in_blocks
from pluglm_samplers.drawing import draw, host_draw, pick_best
from pluglm_samplers.ranking import drop_below, keep_best, sort_best
from pluglm_samplers.top_p import keep_nuclei, nucleus_sizes

SIZES = (1, 5, 257, 5003)
MODULES = {entry.name: entry.target.partition(":")[0] for entry in list_entries("logits_step")}
TWO_WAYS = sorted(name for name, module in MODULES.items() if hasattr(import_module(module), "on_host"))


@pytest.mark.parametrize("name", TWO_WAYS)
def test_steps_give_what_torch_gives_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for other devices, on tensors of the host. Without ties but exact ones, which both decide by id."""
    generator = np.random.default_rng(11)
    one = step(name, 1500)
    rows = []
    while len(rows) < 24:
        drawn = random_params(generator, 1500)
        params = SamplingParams(**{key: drawn[key] for key in one.parameters if key in drawn})
        if one.is_active(params):
            rows.append(row(params, prompt=(5, 9, 5), output=(9, 9, 30), seed=len(rows)))
    logits_RV = random_logits(len(rows), 1500, seed=6)
    logits_RV[0, 2:] = -torch.inf
    found_RV = one.apply(logits_RV.clone(), rows)
    for place in (MODULES[name], "pluglm_samplers.ranking"):
        monkeypatch.setattr(f"{place}.on_host", lambda logits_RV: False)
    elsewhere_RV = one.apply(logits_RV.clone(), rows)
    assert torch.equal(found_RV > -torch.inf, elsewhere_RV > -torch.inf)
    torch.testing.assert_close(found_RV, elsewhere_RV, rtol=1e-5, atol=1e-5)


def test_all_steps_with_two_ways_were_found() -> None:
    assert set(TWO_WAYS) == {
        "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "dynamic_temperature",
        "top_n_sigma", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "xtc",
    }  # fmt: skip


@pytest.mark.parametrize("vocab_size", SIZES)
def test_rows_are_drawn_as_torch_draws_them(vocab_size: int) -> None:
    logits_RV = torch.cat([random_logits(8, vocab_size, seed=seed) for seed in range(6)])
    rows = [row(seed=index) for index in range(len(logits_RV))]
    coins = np.random.default_rng(3).uniform(size=len(rows)).tolist()
    coins[4:8] = [2.0**-53, 1 - 2.0**-53, 0.5, 0.25]
    expected = inverse_cdf(logits_RV.softmax(-1), torch.tensor(coins, dtype=torch.float64))
    has_mass = (logits_RV > -torch.inf).any(-1).tolist()
    drawn = draw(logits_RV, rows, lambda seed, lane, position: coins[seed])
    assert drawn == [token if one else NO_TOKEN for token, one in zip(expected.tolist(), has_mass, strict=True)]


@pytest.mark.parametrize("vocab_size", [1024, 1025, 5003])
def test_every_stretch_of_a_row_can_be_drawn_from(vocab_size: int) -> None:
    """Equal logits: coin (i + 1/2) / V is token i. With one token of no mass before it, and a masked one behind."""
    logits_V = torch.zeros(vocab_size)
    logits_V[0], logits_V[-1] = -200.0, -torch.inf
    tokens = np.arange(1, vocab_size - 1)
    logits_RV = logits_V.expand(len(tokens), -1).numpy()
    assert host_draw(logits_RV, ((tokens - 0.5) / len(tokens)).tolist()) == tokens.tolist()


@pytest.mark.parametrize("vocab_size", [17, 2000])
def test_rows_that_have_no_token(vocab_size: int) -> None:
    logits_RV = torch.zeros(4, vocab_size)
    logits_RV[0], logits_RV[1, 3], logits_RV[2, 3] = -torch.inf, torch.nan, torch.inf
    assert draw(logits_RV, [row(seed=seed) for seed in range(4)])[:3] == [NO_TOKEN] * 3
    assert draw(logits_RV, [row(seed=seed) for seed in range(4)])[3] >= 0


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.5, 0.95, 1 - 1e-9])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_nucleus_is_that_of_the_whole_ranking(vocab_size: int, top_p: float) -> None:
    for scale in (0.1, 1.0, 5.0):
        logits_RV = random_logits(8, vocab_size, seed=4) * scale
        sizes_R = nucleus_sizes(torch.sort(logits_RV, descending=True).values, [top_p] * len(logits_RV))
        ranks_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        expected_RV = logits_RV.masked_fill(ranks_RV >= sizes_R[:, None], -torch.inf)
        assert torch.equal(keep_nuclei(logits_RV, [top_p] * len(logits_RV), None), expected_RV)


@pytest.mark.parametrize("vocab_size", [3, 3000])
def test_a_nucleus_of_a_broken_row_is_left_to_whoever_draws(vocab_size: int) -> None:
    logits_RV = torch.zeros(1, vocab_size)
    logits_RV[0, 1] = torch.nan
    assert bool(keep_nuclei(logits_RV, [0.5], None).isnan().any())


@pytest.mark.parametrize("vocab_size", SIZES)
def test_order_and_bounds_are_those_of_torch(vocab_size: int) -> None:
    logits_RV = random_logits(8, vocab_size, seed=5)
    ranks_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    for count in {1, max(1, vocab_size // 100), max(1, vocab_size // 3), vocab_size}:
        assert torch.equal(sort_best(logits_RV, count), torch.topk(logits_RV, count).values)
        counts_R = torch.tensor([count] * 4 + [1] * 4)
        expected_RV = logits_RV.masked_fill(ranks_RV >= counts_R[:, None], -torch.inf)
        assert torch.equal(keep_best(logits_RV.clone(), counts_R), expected_RV)
    floor_R1 = logits_RV.amax(-1, keepdim=True) - 1
    expected_RV = logits_RV.masked_fill(logits_RV < floor_R1, -torch.inf)
    assert torch.equal(drop_below(logits_RV, floor_R1), expected_RV)


def test_long_rows_are_taken_alone_and_by_their_live_tokens_when_these_are_few() -> None:
    logits_RV = torch.full((4, 3000), -torch.inf)
    logits_RV[0, 5:900], logits_RV[1], logits_RV[2, 7] = 1.0, 2.0, torch.nan
    seen: list[tuple[int, ...]] = []
    in_blocks(lambda logits_BC: seen.append(logits_BC.shape), logits_RV)
    assert seen == [(1, 895), (1, 3000), (1, 1)]
    assert few_live(logits_RV[1].numpy()) is None


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
