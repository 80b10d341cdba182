"""Public reports of samplers gone wrong, each with what is right. test_sampling_reports_complete.py lists them all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import chain, kept, random_logits, random_row, row, step, transformed

from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.verification.drawing import inverse_cdf
from pluglm_samplers.drawing import draw
from pluglm_samplers.penalties import RepetitionConfig, RepetitionPenalty
from pluglm_samplers.presets import PRESETS

DEFAULT = PRESETS["default"]
INF = math.inf


@pytest.mark.parametrize("preset", PRESETS)
def test_top_k_one_is_greedy_beside_any_neighbour(preset: Any) -> None:
    """vllm #5404: top_k=1 and temperature=0 gave different tokens. Ties go to the lowest id in both."""
    logits_RV = random_logits(64, 17, seed=5)
    one, greedy, other = SamplingParams(top_k=1, temperature=1.7), SamplingParams(temperature=0.0), SamplingParams()
    sampler = chain(17, preset=preset)
    expected = sampler.sample(logits_RV.clone(), [row(greedy)] * 64)
    assert sampler.sample(logits_RV.clone(), [row(one, seed=index) for index in range(64)]) == expected
    mixed = [row(other if index % 2 else one, seed=index) for index in range(64)]
    assert sampler.sample(logits_RV.clone(), mixed)[::2] == expected[::2]


def test_top_k_comes_before_top_p_and_equal_tokens_rank_by_id() -> None:
    """vllm #1885: with top_p first, and with an ascending sort, other tokens were kept."""
    logits = [math.log(one) for one in (0.3, 0.3, 0.2, 0.2)]
    assert kept(DEFAULT, logits, top_k=3, top_p=0.7) == [0, 1]  # 0.6 of 0.8; of all four it would take three
    assert kept(DEFAULT, logits, top_k=1) == [0]
    assert kept(DEFAULT, logits, top_p=0.7) == [0, 1, 2]


def test_top_p_renormalises_what_top_k_left() -> None:
    """mlx-lm #388: top_p of a row that no longer summed to 1 masked everything."""
    flat = [0.0] * 100
    assert kept(DEFAULT, flat, top_k=10, top_p=0.95) == list(range(10))
    assert kept(DEFAULT, flat, top_k=10, top_p=0.5) == list(range(5))
    assert kept(DEFAULT, flat, top_k=10, top_p=0.0) == [0]


def test_a_draw_is_an_id_of_positive_probability() -> None:
    """TensorRT-LLM #1590: top-p now and then gave ids outside the vocabulary. Coins at both ends, all kinds of rows."""
    logits_RV = random_logits(400, 23, seed=6)
    for coin in (2.0**-53, 0.5, 1 - 2.0**-53):
        drawn = draw(logits_RV.clone(), [row()] * 400, lambda seed, lane, position, coin=coin: coin)
        assert all(0 <= token < 23 for token in drawn)
        assert bool((logits_RV.gather(1, torch.tensor(drawn)[:, None]) > -INF).all())


@pytest.mark.parametrize("preset", PRESETS)
def test_more_than_the_vocabulary_is_all_of_it(preset: Any) -> None:
    """CTranslate2 #586, TransformerLens #1347, gemma #789: top_k above the vocabulary crashed."""
    for top_k in (5, 6, 2**31, 2**63 - 1):
        assert kept(PRESETS[preset], [0.0] * 5, top_k=top_k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    """vllm #1623, aici #19, transformers #11267: logits over a tiny temperature overflowed, and the draw aborted."""
    logits_RV = torch.tensor([[3e4, 2.9e4, -3e4, 3e38], [60.0, 59.0, -INF, 10.0], [1e-30, 0.0, -1.0, -2.0]])
    params = SamplingParams(temperature=temperature)
    drawn = chain(4).sample(logits_RV, [row(params, seed=index) for index in range(3)])
    assert drawn[:2] == [3, 0]
    assert drawn[2] in (0, 1)  # equal in float32 at any such temperature


def test_temperature_zero_is_greedy_and_divides_by_nothing() -> None:
    """exllama #226, litgpt #401, transformers #25722: a temperature of 0 divided by zero or was an error."""
    for temperature in (0.0, 1e-300, 9.9e-6):
        assert chain(3).sample(torch.tensor([[0.0, 2.0, 2.0]]), [row(SamplingParams(temperature=temperature))]) == [1]


def test_a_coin_at_either_end_never_takes_a_token_without_probability() -> None:
    """pytorch #48841, transformers #23088, pytorch #192577: multinomial returned tokens of probability zero."""
    probs_V = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0])
    coins = torch.tensor([0.0, 5e-324, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert inverse_cdf(probs_V.repeat(4, 1), coins).tolist() == [1, 1, 4, 4]


def test_a_row_without_mass_fails_alone() -> None:
    """sglang #27649: a row that masks left empty killed the scheduler. More in test_rows_without_token.py."""
    rows = [row(SamplingParams(top_p=0.5), seed=index) for index in range(3)]
    expected = chain(4).sample(torch.zeros(3, 4), rows)
    rows[1] = row(SamplingParams(allowed_token_ids=(1,), bad_words_ids=((1,),)))
    assert chain(4).sample(torch.zeros(3, 4), rows) == [expected[0], NO_TOKEN, expected[2]]


def test_a_negative_logit_is_multiplied() -> None:
    """transformers #2302, NeMo Speech #8194: division rewarded repeated tokens with negative logits."""
    found_RV = transformed(DEFAULT, torch.tensor([[2.0, -2.0, 0.0, -2.0]]), [
        row(SamplingParams(repetition_penalty=2.0), prompt=(0, 1), output=(2,))
    ])  # fmt: skip
    assert found_RV.tolist() == [[1.0, -4.0, 0.0, -2.0]]


def test_frequency_and_presence_see_the_output_and_repetition_both() -> None:
    """TensorRT-LLM #5623, vmlx-swift #295, transformers #36642, TGI #1170: which of them count the prompt."""
    for params, expected in (
        (SamplingParams(frequency_penalty=1.0), [4.0, 2.0, 4.0]),
        (SamplingParams(presence_penalty=1.0), [4.0, 3.0, 4.0]),
        (SamplingParams(repetition_penalty=2.0), [2.0, 2.0, 4.0]),
    ):
        one = row(params, prompt=(0, 0, 0, 1), output=(1, 1))
        assert transformed(DEFAULT, torch.full((1, 3), 4.0), [one]).tolist() == [expected]


def test_repetition_may_be_kept_to_a_window_and_off_the_tokens_of_a_template() -> None:
    """transformers #36642, TGI #1170: a penalty on everything in the prompt breaks the form of chats."""
    one = row(SamplingParams(repetition_penalty=2.0), prompt=(0, 1, 2), output=(3, 1))

    def left(**config: Any) -> list[float]:
        found_RV = RepetitionPenalty(RepetitionConfig(**config), 5).apply(torch.full((1, 5), 4.0), [one])
        return [float(value) for value in found_RV[0]]

    assert left() == [2.0, 2.0, 2.0, 2.0, 4.0]
    assert left(window=2) == [4.0, 2.0, 4.0, 2.0, 4.0]
    assert left(window=99, exclude_ids=(1, 4)) == [2.0, 4.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("parameter", ["repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier"])
def test_an_id_of_minus_one_is_an_error_and_not_the_last_token(parameter: str) -> None:
    """TGI #1765, unsloth #6923: padding and placeholders of -1 were penalised as the last token."""
    one = row(SamplingParams(**{parameter: 1.5}), output=(-1, -1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"token ids -1\.\.-1 leave the vocabulary of 4"):
        transformed(DEFAULT, torch.zeros(1, 4), [one])


def test_typical_keeps_the_token_that_reaches_the_mass() -> None:
    """transformers #27165: it was dropped."""
    assert kept(DEFAULT, [0.0] * 8, typical_p=0.26) == [0, 1, 2]
    assert kept(DEFAULT, [5.0, 0.0], typical_p=0.1) == [0]


def test_whether_min_p_sees_the_temperature_is_the_order_of_the_steps() -> None:
    """llama.cpp #4091, llama.cpp #3841, text-generation-webui #4463: it was measured now before, now after."""
    logits = [0.0, math.log(0.3), math.log(0.1)]
    hot = {"temperature": 2.0, "min_p": 0.31}  # the square roots are 0.548 and 0.316
    assert kept(DEFAULT, logits, **hot) == [0, 1, 2]
    assert kept(PRESETS["llama.cpp"], logits, **hot) == [0]


def test_breakers_keep_the_form_of_a_chat_from_counting_as_a_copy() -> None:
    """exllamav2 #800: with breakers, DRY made long chats worse. Turns `9 1 2` open alike, and nothing pays."""
    chat = (9, 1, 2, 9, 1, 2, 9, 1, 2, 9)
    form = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_breaker_ids=(9,))
    logits_RV = torch.zeros(1, 10)
    assert transformed(DEFAULT, logits_RV, [row(form, prompt=chat)]).tolist() == logits_RV.tolist()
    # one token on, the run is one, and two tokens on it is two: 2 ** (2 - 2), however long the chat; 9 itself is free
    assert transformed(DEFAULT, logits_RV, [row(form, prompt=(*chat, 1))])[0, 2] == 0.0
    assert transformed(DEFAULT, logits_RV, [row(form, prompt=(*chat, 1, 2))])[0, 9] == 0.0
    deeper = (9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2)
    found_V = transformed(DEFAULT, logits_RV, [row(form, prompt=deeper)])[0]
    assert {token: float(cost) for token, cost in enumerate(found_V) if cost} == {3: -1.0, 4: -1.0}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_seed_means_the_same_beside_any_neighbours(preset: Any) -> None:
    """vllm #17524, vllm #51226: a seeded request changed with the order of the batch, and with unseeded neighbours."""
    generator = np.random.default_rng(1)
    names = PRESETS[preset]
    rows = [replace(random_row(generator, 17), seed=index % 3, position=index) for index in range(30)]
    logits_RV = random_logits(30, 17, seed=2)
    sampler = chain(17, steps=list(names))
    alone = [sampler.sample(logits_RV[index : index + 1].clone(), [rows[index]])[0] for index in range(30)]
    for seed in range(3):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed)).tolist()
        for some in (order, order[:7]):
            found = sampler.sample(logits_RV[some].clone(), [rows[index] for index in some])
            assert found == [alone[index] for index in some]


def test_lanes_of_one_request_differ() -> None:
    """vllm #11898, llama.cpp #18700, sglang #28805, tokenspeed #1613: n > 1 gave n equal outputs."""
    rows = [row(seed=7, lane=lane, position=position) for lane in range(4) for position in range(20)]
    drawn = chain(50).sample(torch.zeros(80, 50), rows)
    assert len({tuple(drawn[lane * 20 : lane * 20 + 20]) for lane in range(4)}) == 4


def test_min_tokens_counts_the_output_and_bans_the_real_ids() -> None:
    """TensorRT-LLM #12358, sglang #31378, vllm #32634: it counted the prompt, masked id -1, missed the model's EOS."""
    one = step("min_tokens", 6, eos_token_ids=(1, 4))
    rows = [row(SamplingParams(min_tokens=2, stop_token_ids=(2,)), (0,) * 9, (0,) * count) for count in (0, 1, 2)]
    banned_RV = one.apply(torch.zeros(3, 6), rows) == -INF
    assert [torch.nonzero(banned_V).flatten().tolist() for banned_V in banned_RV] == [[1, 2, 4], [1, 2, 4], []]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_padding_are_never_sampled(temperature: float) -> None:
    """mlx-vlm #1917: ids that the tokenizer does not have came out. The kernel masks them; no step brings them back."""
    generator = np.random.default_rng(4)
    logits_RV = random_logits(200, 20, seed=9)
    logits_RV[:, 17:] = -INF
    rows = [random_row(generator, 17) for _ in range(200)]
    rows = [replace(one, params=one.params.model_copy(update={"temperature": temperature})) for one in rows]
    assert max(chain(20).sample(logits_RV, rows)) < 17


def test_an_allow_list_of_bad_words_is_an_error_and_no_other_token() -> None:
    """vllm #57986: when both masks left nothing, tokens outside the list came out."""
    params = {"allowed_token_ids": (1, 2), "bad_words_ids": ((1,), (0, 2))}
    for temperature in (0.0, 1.0):
        one = SamplingParams(temperature=temperature, **params)  # type: ignore[arg-type]
        assert chain(4).sample(torch.zeros(1, 4), [row(one, output=(0,))]) == [NO_TOKEN]
        assert chain(4).sample(torch.zeros(1, 4), [row(one, output=(3,))]) == [2]


def test_both_encodings_of_a_word_are_banned() -> None:
    """vllm #32557, TensorRT-LLM #15706: of "word" and " word" one was left. Both runs can be given, of any lengths."""
    with_space, without = (5,), (3, 4)
    params = SamplingParams(bad_words_ids=(with_space, without))
    found_RV = transformed(DEFAULT, torch.zeros(2, 6), [row(params, output=(0,)), row(params, output=(3,))])
    assert (found_RV == -INF).tolist() == [[token == 5 for token in range(6)], [token in (4, 5) for token in range(6)]]
