"""Mirostat beside the float64 oracle: mu over many tokens, windows of drafts, refusals, lanes, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import chain, random_logits, row, step
from sampling_oracle import Row, softmax, surprising, zipf_count

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.logits_params import MIROSTAT_REPLACES
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.statistics import cell_test

INF = math.inf
VOCAB = 40


def lane_row(params: SamplingParams, output: list[int], memory: dict[Any, Any] | None, seed: int = 0) -> SampleRow:
    return replace(row(params, output=tuple(output), seed=seed, position=len(output)), memory=memory)


def rows_of_text(num: int, seed: int, vocab_size: int = VOCAB) -> torch.Tensor:
    """Logits that fall like those of text do, without ties: one row a position."""
    generator = torch.Generator().manual_seed(seed)
    ranks_V = torch.arange(1, vocab_size + 1)
    noise_RV = torch.randn(num, vocab_size, generator=generator) * 0.7
    order = [torch.randperm(vocab_size, generator=generator) for _ in range(num)]
    return torch.stack([(-1.4 * ranks_V.log() + noise)[some] for some, noise in zip(order, noise_RV, strict=True)])


def next_mu(mu: float, logits: Row, token: int, params: SamplingParams) -> float:
    """By the paper, with the surprise of the truncated and renormalised row."""
    left, _ = surprising(logits, params.mirostat, mu)
    return mu - params.mirostat_eta * (-math.log2(softmax(left)[token]) - params.mirostat_tau)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(3.0, 0.1), (1.5, 0.6), (1.0, 0.2), (6.0, 0.0)])
def test_sixty_tokens_equal_the_oracle(version: int, tau: float, eta: float) -> None:
    """Kept sets at every position, each with the mu that all tokens before it led to."""
    params = SamplingParams(mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
    one, compared, sizes = step("mirostat", VOCAB), 0, set[int]()
    for seed in range(8):
        memory: dict[Any, Any] = {}
        output, mu = list[int](), 2 * tau
        for logits_V in rows_of_text(60, seed):
            found_V = one.apply(logits_V[None].clone(), [lane_row(params, output, memory)])[0]
            logits = logits_V.double().numpy()
            expected, margin = surprising(logits, version, mu)
            if margin < 1e-3:
                break  # float32 may decide it either way, and everything after it follows
            np.testing.assert_array_equal(found_V.numpy() > -INF, expected > -INF)
            kept = np.flatnonzero(expected > -INF)
            np.testing.assert_array_equal(found_V.numpy()[kept], logits_V.numpy()[kept])
            sizes.add(len(kept))
            token = int(kept[(seed * 7 + len(output) * 5) % len(kept)])
            mu = next_mu(mu, logits, token, params)
            output.append(token)
            compared += 1
    assert compared > 150
    assert eta == 0 or len(sizes) > 2


def drawn(version: int, logits_RV: torch.Tensor, windows: list[list[int]], sizes: list[int]) -> list[torch.Tensor]:
    """What is left of each committed position when its text comes in windows: drafts, some of which are refused."""
    params = SamplingParams(mirostat=version, mirostat_tau=1.5, mirostat_eta=0.5)
    one, memory, output, left = step("mirostat", VOCAB), dict[Any, Any](), list[int](), list[torch.Tensor]()
    for drafts, num_kept in zip(windows, sizes, strict=True):
        start = len(output)
        rows = [lane_row(params, output + drafts[:count], memory) for count in range(len(drafts) + 1)]
        found_RV = one.apply(logits_RV[start : start + len(rows)].clone(), rows)
        for index in range(num_kept):
            left.append(found_RV[index])
            output.append(committed(logits_RV, len(output), found_RV[index]))
    return left


def committed(logits_RV: torch.Tensor, position: int, found_V: torch.Tensor) -> int:
    """One of the tokens that are left, chosen by the position."""
    kept = torch.nonzero(found_V > -INF).flatten().tolist()
    return int(kept[(position * 3) % len(kept)])


@pytest.mark.parametrize("version", [1, 2])
def test_windows_with_refused_drafts_equal_one_token_at_a_time(version: int) -> None:
    """Drafts that were right, wrong, impossible, or right for a while: what is committed has the same rows."""
    logits_RV = rows_of_text(40, 3)
    alone = drawn(version, logits_RV, [[] for _ in range(30)], [1] * 30)
    text = [committed(logits_RV, place, found_V) for place, found_V in enumerate(alone)]
    generator = np.random.default_rng(version)
    windows, sizes, place = list[list[int]](), list[int](), 0
    while place < 30:
        num_drafts, num_right = (int(generator.integers(0, high)) for high in (8, 5))
        right = text[place : place + min(num_drafts, num_right)]
        wrong = generator.integers(0, VOCAB, num_drafts - len(right)).tolist()
        if wrong and place + len(right) < 30 and wrong[0] == text[place + len(right)]:
            wrong[0] = (wrong[0] + 1) % VOCAB
        windows.append([*right, *wrong])
        sizes.append(min(len(right) + 1, 30 - place))
        place += sizes[-1]
    assert sum(map(len, windows)) > sum(sizes)  # some were refused
    for one, other in zip(drawn(version, logits_RV, windows, sizes), alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("version", [1, 2])
def test_forks_and_neighbours_leave_a_lane_alone(version: int) -> None:
    """A copy of the memory goes on by itself; lanes in one call, in any order, are what they are alone."""
    params = SamplingParams(mirostat=version, mirostat_tau=2.5, mirostat_eta=0.8)
    one, logits_RV = step("mirostat", VOCAB), rows_of_text(2, 5) * 0.7
    memory: dict[Any, Any] = {}
    best = int(logits_RV[0].argmax())
    one.apply(logits_RV[:1].clone(), [lane_row(params, [], memory)])
    forks = [{key: dict(value) for key, value in memory.items()} for _ in range(3)]
    expected_V = one.apply(logits_RV[1:2].clone(), [lane_row(params, [best], forks[0])])[0]
    odd = int(torch.nonzero(one.apply(logits_RV[:1].clone(), [lane_row(params, [], {})])[0] > -INF)[-1])
    diverging_V = one.apply(logits_RV[1:2].clone(), [lane_row(params, [odd], forks[1])])[0]
    assert odd != best
    assert not torch.equal(expected_V, diverging_V)
    rows = [lane_row(params, [odd], forks[2]), lane_row(params, [best], memory)]
    found_RV = one.apply(logits_RV[1:2].repeat(2, 1), rows)
    assert torch.equal(found_RV, torch.stack([diverging_V, expected_V]))


def test_windows_of_several_lanes_come_in_any_order() -> None:
    params = [SamplingParams(mirostat=1 + lane % 2, mirostat_tau=1.0 + 0.2 * lane) for lane in range(5)]
    one, logits_RV = step("mirostat", VOCAB), rows_of_text(20, 9)
    drafts = [[], [3], [3, 3, 3], [5, 5], [1]]

    def window(lane: int, memory: dict[Any, Any]) -> list[SampleRow]:
        return [lane_row(params[lane], drafts[lane][:count], memory) for count in range(len(drafts[lane]) + 1)]

    alone_V: list[torch.Tensor] = []
    for lane in range(5):
        rows = window(lane, {})
        start = len(alone_V)
        alone_V += list(one.apply(logits_RV[start : start + len(rows)].clone(), rows))
    rows = [some for lane in range(5) for some in window(lane, {})]
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    together_RV = one.apply(logits_RV[order].clone(), [rows[index] for index in order])
    assert torch.equal(together_RV, torch.stack(alone_V)[order])


def test_a_row_behind_a_broken_one_fails_alone() -> None:
    """The engine leaves broken rows out of the call, and never gets to what lies behind them."""
    params, memory = SamplingParams(mirostat=2), dict[Any, Any]()
    sampler, logits_RV = chain(VOCAB), rows_of_text(4, 2)
    rows = [row(SamplingParams(), seed=5), lane_row(params, [3], memory), lane_row(params, [], {}, seed=6)]
    found = sampler.sample(logits_RV[:3].clone(), rows)
    others = sampler.sample(logits_RV[[0, 2]].clone(), [rows[0], lane_row(params, [], {}, seed=6)])
    assert found == [others[0], NO_TOKEN, others[1]]
    assert memory == {}


def test_the_surprise_settles_at_tau() -> None:
    """What mirostat is for (section 5 of the paper): means over 1,500 tokens of rows that all could give that much."""
    logits_RV = rows_of_text(1500, 11, vocab_size=1000)
    for version, tau in ((1, 2.5), (2, 2.5), (2, 3.5)):
        sampler, memory, output, bits = chain(1000), dict[Any, Any](), list[int](), list[float]()
        params = SamplingParams(mirostat=version, mirostat_tau=tau)
        one = step("mirostat", 1000)
        for logits_V in logits_RV:
            here = lane_row(params, output, memory, seed=1)
            left_V = one.apply(logits_V[None].clone(), [here])[0]
            (token,) = sampler.sample(logits_V[None].clone(), [here])
            bits.append(-math.log2(float(left_V.double().softmax(-1)[token])))
            output.append(token)
        assert abs(np.mean(bits[100:]) - tau) < 0.1, (version, tau)


def test_version_one_counts_by_zipf() -> None:
    """Of p_i = c / i**2 the exponent is 2, whatever c, so k is sqrt(2**mu / (1 - 1/n))."""
    logits_V = -2 * torch.arange(1, 201, dtype=torch.float64).log()
    (count,), exponent = zipf_count(logits_V.numpy(), 6.0)
    assert exponent == pytest.approx(2.0)
    assert count == pytest.approx(math.sqrt(64 / (1 - 1 / 200)))
    one = row(SamplingParams(mirostat=1, mirostat_tau=3.0))
    found_V = step("mirostat", 200).apply(logits_V.float()[None], [one])[0]
    assert torch.nonzero(found_V > -INF).flatten().tolist() == list(range(8))


@pytest.mark.parametrize("version", [1, 2])
def test_odd_rows(version: int) -> None:
    """Flat, one alive, two alive, none: at least the best one stays, and nothing masked comes back."""
    rows_RV = torch.full((4, 8), -INF)
    rows_RV[0] = 2.0
    rows_RV[1, 5] = -7.0
    rows_RV[2, [2, 6]] = torch.tensor([1.0, 1.0])
    for tau in (0.0, 0.2, 1.5, 1e300):
        params = SamplingParams(mirostat=version, mirostat_tau=tau)
        found_RV = step("mirostat", 8).apply(rows_RV.clone(), [row(params)] * 4) > -INF
        assert not bool((found_RV & (rows_RV == -INF)).any())
        assert found_RV.sum(-1).gt(0).tolist() == [True, True, True, False]
        if tau == 1e300:
            assert torch.equal(found_RV, rows_RV > -INF)


@pytest.mark.parametrize("preset", ["default", "joint", "llama.cpp"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_hundred_thousand_draws_follow_the_truncated_law(preset: Any, version: int) -> None:
    logits = torch.arange(17) * -0.25
    params = SamplingParams(mirostat=version, mirostat_tau=1.8, temperature=1.4)
    expected, margin = surprising(logits.double().numpy() / 1.4, version, 3.6)
    assert margin > 1e-3
    assert 1 < np.count_nonzero(expected > -INF) < 17
    rows = [row(params, seed=seed) for seed in range(100_000)]
    with torch.inference_mode():
        found = chain(17, preset=preset).sample(logits.repeat(100_000, 1), rows)
    counts = np.bincount(found, minlength=17).tolist()
    assert cell_test(counts, softmax(expected).tolist(), 1e-6 / 6) is None


def test_greedy_ignores_it_and_other_truncations_are_refused_beside_it() -> None:
    logits_RV = random_logits(8, 17, seed=1)
    greedy = [row(SamplingParams(temperature=0.0, mirostat=version)) for version in (0, 2)]
    assert chain(17).sample(logits_RV.clone(), greedy[1:] * 8) == chain(17).sample(logits_RV.clone(), greedy[:1] * 8)
    on = dict.fromkeys(MIROSTAT_REPLACES, 0.5) | {"top_k": 3}
    for name, value in on.items():
        with pytest.raises(ValueError, match=f"mirostat takes the place of {name} {value}; leave one of them out"):
            SamplingParams(mirostat=1, **{name: value})  # type: ignore[arg-type]
    assert SamplingParams(mirostat=2, top_k=-1, temperature=0.7).mirostat == 2
    for wrong in (3, -1, True, "2"):
        with pytest.raises(ValueError, match="mirostat"):
            SamplingParams(mirostat=wrong)  # type: ignore[arg-type]


def test_a_preset_without_it_refuses_it() -> None:
    assert str(chain(5, preset="vllm").check(SamplingParams(mirostat=2))).startswith("mirostat=2")
    assert chain(5, preset="llama.cpp").check(SamplingParams(mirostat=2)) is None
