"""The fast path of a chain gives what the steps give one by one: same tokens kept, same bits, same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_cases import chain, context, random_params, row, step

from pluglm.assembly.registry import list_entries, load
from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers import ranking
from pluglm_samplers.blocks import SHORT
from pluglm_samplers.chain import ChainConfig, ChainSampler
from pluglm_samplers.fused import MOST_KEPT, OrderStep, find_candidates
from pluglm_samplers.presets import PRESETS
from pluglm_samplers.ranking import find_best

SIZE = 3 * SHORT + 7
ORDER_STEPS = sorted(entry.name for entry in list_entries("logits_step") if isinstance(load(entry), OrderStep))


def smooth(generator: np.random.Generator) -> Any:
    return generator.normal(size=SIZE) * 4


def tied(generator: np.random.Generator) -> Any:
    return generator.normal(size=SIZE).round() * 2


def half_precise(generator: np.random.Generator) -> Any:
    """As a model in bfloat16 gives them: a hundred tokens of equal logits are common."""
    return torch.from_numpy(generator.normal(size=SIZE) * 6).bfloat16().float().numpy()


def nearly_all_masked(generator: np.random.Generator) -> Any:
    """By a grammar, to fewer tokens than most top_k keep."""
    row = np.full(SIZE, -np.inf)
    row[generator.integers(0, SIZE, 9)] = generator.normal(size=9)
    return row


def one_alive(generator: np.random.Generator) -> Any:
    return np.where(np.arange(SIZE) == generator.integers(SIZE), -40.0, -np.inf)


def flat(generator: np.random.Generator) -> Any:
    """Everything ties with the last one kept."""
    return np.zeros(SIZE)


def clustered(generator: np.random.Generator) -> Any:
    """The best side by side, and again every 512 tokens, where groups of tokens repeat."""
    row = generator.normal(size=SIZE)
    row[100:180] += 9.0
    row[5::512] += 9.0
    return row


def huge(generator: np.random.Generator) -> Any:
    return generator.choice([3.0e38, -3.0e38, 1.0e30, 0.0], size=SIZE)


def merging(generator: np.random.Generator) -> Any:
    """Different logits, of which many become equal once that of the best is taken from them."""
    row = generator.normal(size=SIZE) * generator.choice([4.0, 400.0])
    row[generator.integers(SIZE)] = 1e8
    return row


ROWS = (smooth, tied, half_precise, nearly_all_masked, one_alive, flat, clustered, huge, merging)

NO_OTHER_TEMPERATURE = {"dynatemp_low": 1.0, "dynatemp_high": 1.0, "top_n_sigma": 0.0}


def batch(kinds: Sequence[Any], seed: int, **chosen: Any) -> tuple[torch.Tensor, list[SampleRow]]:
    """One row of each kind, with parameters at random but for the chosen ones, and a text of few different tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(len(kinds)):
        params = {**random_params(generator, SIZE), "mirostat": 0, **chosen}
        prompt, output = (tuple(generator.choice([3, 99, SIZE - 1], size=8).tolist()) for _ in range(2))
        one = row(SamplingParams(**params), prompt, output, seed=seed, lane=index, position=index)
        rows.append(one)
    logits = np.stack([kind(generator) for kind in kinds]).astype(np.float32)
    return torch.from_numpy(logits), rows


def fused_parts(sampler: ChainSampler, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> Any:
    """What the fused steps make of candidates, put back into whole rows, and of whole rows; None if none is fused."""
    plan = sampler._plan(logits_RV, rows)
    before_RV = sampler._through(plan.steps, logits_RV.clone(), rows)[plan.fused]
    some = [rows[index] for index in plan.fused]
    if not plan.fused:
        return None
    found, _, steps = sampler._candidates(before_RV.clone(), some, plan)
    if found is None:
        return None
    short_RC, ids_RC = found.logits_RC.clone(), torch.tensor(found.ids)
    is_padding_RC = short_RC == -torch.inf
    short_RC = sampler._through(steps, short_RC, some)
    fused_RV = torch.full_like(before_RV, -torch.inf)
    for number, ids_C in enumerate(ids_RC):
        real_C = ~is_padding_RC[number]
        fused_RV[number, ids_C[real_C]] = short_RC[number, real_C]
    return fused_RV, sampler._through(plan.fused_steps, before_RV, some), len(steps) == len(plan.fused_steps)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(ROWS), min_size=1, max_size=5), st.integers(0, 2**32), st.data())
def test_the_same_is_kept_and_drawn(preset: Any, kinds: list[Any], seed: int, data: st.DataObject) -> None:
    """Random parameters a row: some rows are fused, others are not, some are greedy."""
    top_k = data.draw(st.sampled_from([None, 1, 5, 50, MOST_KEPT]))
    shared = {} if top_k is None else {"top_k": top_k}
    if preset == "llama.cpp" or data.draw(st.booleans()):
        shared["top_n_sigma"] = 0.0  # looks at the whole row, and so is never behind a step that keeps few
    if data.draw(st.booleans()):
        shared |= {
            **NO_OTHER_TEMPERATURE,
            "temperature": data.draw(st.sampled_from([0.7, 3.0, 1e-5, 1e-4, 1e30, 3e38])),
        }
    logits_RV, rows = batch(kinds, seed, **shared)
    if data.draw(st.booleans()):
        rows[0] = replace(rows[0], params=SamplingParams(temperature=0.0, repetition_penalty=1.3))
    supported = [one for one in rows if chain(SIZE, preset=preset).check(one.params) is None]
    logits_RV = logits_RV[[rows.index(one) for one in supported]]
    if not supported:
        return
    fast, slow = chain(SIZE, preset=preset), chain(SIZE, preset=preset, fast=False)
    assert fast.sample(logits_RV.clone(), supported) == slow.sample(logits_RV.clone(), supported)
    if (parts := fused_parts(fast, logits_RV, supported)) is not None:
        assert torch.equal(*parts[:2])


def test_these_rows_are_fused() -> None:
    """The property above is not about nothing."""
    params = {"top_k": 50, "allowed_token_ids": None, "temperature": 0.7}
    for kind in ROWS:
        parts = [fused_parts(chain(SIZE), *batch([kind] * 2, seed, **params)) for seed in range(5)]
        assert sum(part is not None for part in parts) >= 3, kind.__name__


@pytest.mark.parametrize("kind", [smooth, half_precise, nearly_all_masked, one_alive, clustered])
def test_candidates_are_looked_for_before_the_temperature(kind: Any) -> None:
    params = {"top_k": 50, "allowed_token_ids": None, "temperature": 0.7, **NO_OTHER_TEMPERATURE}
    for seed in range(5):
        kept, expected, is_before = fused_parts(chain(SIZE), *batch([kind] * 2, seed, **params))
        assert is_before
        assert torch.equal(kept, expected)


def test_rows_with_and_without_a_temperature_are_fused_together() -> None:
    logits_RV, _ = batch([smooth] * 3, 1)
    of_rows = ({"temperature": 0.7}, {}, {"temperature": 0.5, "repetition_penalty": 1.2})
    rows = [row(SamplingParams(top_k=50, **params), (3, 4), (5,)) for params in of_rows]  # type: ignore[arg-type]
    plan = chain(SIZE)._plan(logits_RV, rows)
    assert plan.fused == [0, 1, 2]
    assert [active for _, active in plan.leading] == [[0, 2]]


def test_tokens_that_the_temperature_makes_equal_rank_by_id() -> None:
    """Near 2**25 float32 has only each second or fourth whole number, so l - 2**25 is the same for all l below 1."""
    logits_RV = torch.full((1, SIZE), -torch.inf)
    logits_RV[0, :200] = 0.25 + torch.arange(200) / 400
    logits_RV[0, 7] = 2.0**25
    kept, expected, _ = fused_parts(chain(SIZE), logits_RV, [row(SamplingParams(top_k=50, temperature=0.5))])
    assert torch.equal(kept, expected)
    assert (kept[0] > -torch.inf).nonzero().flatten().tolist() == list(range(50))


def test_tokens_that_the_temperature_makes_equal_but_far_apart_are_taken_whole() -> None:
    """All quotients are below the least float32, and so zero; looking a few roundings lower is too little."""
    logits_RV = (torch.arange(SIZE).float() * 1e-9)[None]
    rows = [row(SamplingParams(top_k=50, temperature=3e38))]
    kept, expected, is_before = fused_parts(chain(SIZE), logits_RV, rows)
    assert not is_before
    assert torch.equal(kept, expected)
    assert chain(SIZE).sample(logits_RV.clone(), rows) == chain(SIZE, fast=False).sample(logits_RV.clone(), rows)


def test_ties_in_the_same_groups_are_taken_whole_and_draw_the_same() -> None:
    """100 of 4,096 groups hold nothing else: too many candidates, in too few groups to tell."""
    size = 48 * 1024
    logits_RV = torch.zeros(2, size)
    logits_RV[:, torch.arange(size) % 4096 < 100] = 1.0
    assert find_candidates(logits_RV, 50) is None
    rows = [row(SamplingParams(top_k=50), seed=seed) for seed in range(2)]
    assert chain(size).sample(logits_RV.clone(), rows) == chain(size, fast=False).sample(logits_RV.clone(), rows)


def test_coins_at_the_ends_draw_the_same() -> None:
    logits_RV, _ = batch([smooth, tied, half_precise], 5)
    rows = [row(SamplingParams(top_k=50, top_p=0.9, min_p=0.05, temperature=0.8), seed=seed) for seed in range(3)]
    fast, slow = chain(SIZE), chain(SIZE, fast=False)
    for coin in (2.0**-53, 0.25, 0.5, 1 - 2.0**-53):
        for sampler in (fast, slow):
            sampler._coins = type("Fixed", (), {"uniform": staticmethod(lambda *key, coin=coin: coin)})()  # type: ignore[assignment]
        assert fast.sample(logits_RV.clone(), rows) == slow.sample(logits_RV.clone(), rows)


@pytest.mark.parametrize("name", ORDER_STEPS)
def test_masked_tokens_between_live_ones_change_no_bit(name: str) -> None:
    """What the fast path relies on: live tokens in a long row, in a padded one, and side by side."""
    generator = np.random.default_rng(3)
    one = step(name, SIZE)
    for num_live in (1, 2, 40, SHORT):
        params = SamplingParams()
        while not one.is_active(params) or params.top_k >= SIZE:
            drawn = random_params(generator, SIZE)
            params = SamplingParams(**{key: drawn[key] for key in one.parameters if key in drawn})
        some = row(params, seed=num_live)
        live = torch.from_numpy(generator.normal(size=(1, num_live)).astype(np.float32) * 3)
        places = torch.from_numpy(np.sort(generator.choice(SIZE, num_live, replace=False)))
        long = torch.full((1, SIZE), -torch.inf)
        long[0, places] = live[0]
        padded = torch.cat((live.clone(), torch.full((1, 5), -torch.inf)), -1)
        alone = one.apply(live.clone(), [some])
        assert torch.equal(one.apply(long, [some])[0, places], alone[0])
        assert torch.equal(one.apply(torch.cat((padded, padded)), [some, some])[1, :num_live], alone[0])


def test_every_truncation_may_be_fused_and_no_step_that_looks_at_ids() -> None:
    read_ids = {"allowed_tokens", "bad_words", "min_tokens", "logit_bias", "repetition_penalty", "frequency_penalty",
                "presence_penalty", "dry", "mirostat"}  # fmt: skip
    assert set(ORDER_STEPS) == {entry.name for entry in list_entries("logits_step")} - read_ids


@pytest.mark.parametrize("in_threads", [False, True])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(ROWS),
    st.integers(0, 2**32),
    st.sampled_from([SIZE, 12_288, 12_289, 30_011, 50_000]),
    st.sampled_from([1, 2, 33, 50, 300, MOST_KEPT, SIZE]),
    st.booleans(),
)
def test_candidates_cover_the_best_tokens_of_which_the_first_of_equals_count(
    monkeypatch: pytest.MonkeyPatch, in_threads: bool, kind: Any, seed: int, size: int, count: int, slack: bool
) -> None:
    """Rows of one part and of several small groups, with tokens behind the last group or none, sorted ones too."""
    monkeypatch.setattr(ranking, "_FOR_THREADS", 1 if in_threads else 1 << 62)
    generator = np.random.default_rng(seed)
    rows = [np.concatenate([one(generator) for _ in range(-(-size // SIZE))])[:size] for one in (kind, smooth)]
    logits_RV = np.stack(rows).astype(np.float32)
    best = find_best(logits_RV, count, slack)
    assert np.array_equal(np.lexsort((best.ids_n, best.rows_n)), np.arange(len(best.ids_n)))
    assert best.highest_R.tolist() == logits_RV.max(-1).tolist()
    for number, values_V in enumerate(logits_RV):
        ids_n = best.ids_n[best.rows_n == number]
        wanted_n = np.argsort(-values_V, kind="stable")[:count]
        wanted_n = wanted_n[values_V[wanted_n] > -np.inf]
        assert set(wanted_n) <= set(ids_n)
        assert len(set(ids_n)) == len(ids_n)
        assert bool((values_V[ids_n] > -np.inf).all())
        left_out = np.delete(values_V, ids_n)
        assert np.count_nonzero(values_V >= best.floor_R[number]) >= min(count, np.count_nonzero(values_V > -np.inf))
        assert left_out.max(initial=-np.inf) <= best.below_R[number]


def test_nothing_is_found_twice_where_ties_meet_an_infinite_logit() -> None:
    logits_RV = np.zeros((1, 1040), dtype=np.float32)
    logits_RV[0, :1024], logits_RV[0, 1030] = 1.0, np.inf
    assert find_best(logits_RV, 5).ids_n.tolist() == [0, 1, 2, 3, 1030]


class Lowest(ComponentConfig):
    """An outside step behind top_k that looks at ids: it must be given whole rows."""


class KeepsLowIds:
    interface_version = 1
    Config = Lowest
    argmax_invariant = False
    parameters = ()

    def __init__(self, config: Any, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        logits_RV[:, 1000:] = -torch.inf
        return logits_RV


def test_a_step_behind_that_looks_at_ids_is_given_whole_rows() -> None:
    known = context(SIZE)
    found = known.resolve_component
    known.resolve_component = lambda kind, name, options: (
        (KeepsLowIds, Lowest()) if name == "low" else found(kind, name, options)
    )
    sampler = ChainSampler(ChainConfig.model_validate({"steps": ["top_k", "low"]}), known)
    logits_RV = torch.zeros(1, SIZE)
    logits_RV[0, [900, 2000, 3000]] = torch.tensor([5.0, 6.0, 7.0])
    assert sampler.sample(logits_RV, [row(SamplingParams(top_k=3))]) == [900]


def test_broken_rows_fail_alone() -> None:
    logits_RV, _ = batch([smooth] * 3, 1)
    logits_RV[0], logits_RV[1, 7] = -torch.inf, torch.nan
    rows = [row(SamplingParams(top_k=50), seed=seed) for seed in range(3)]
    expected = chain(SIZE, fast=False).sample(logits_RV[2:].clone(), rows[2:])
    for fast in ("auto", False):
        assert chain(SIZE, fast=fast).sample(logits_RV.clone(), rows) == [-1, -1, *expected]
