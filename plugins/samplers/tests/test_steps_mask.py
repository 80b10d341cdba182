"""Hard masks and bias: what they ban, what they leave alone, and that nothing brings a banned token back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampler_cases import kept, row, step

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.presets import PRESETS

DEFAULT = PRESETS["default"]
INF = math.inf
FLAT = [0.0] * 6


def left(
    name: str, output: tuple[int, ...] = (), eos: tuple[int, ...] = (), prompt: Any = (), **params: Any
) -> list[int]:
    one = step(name, 6, eos)
    result_RV = one.apply(torch.zeros(1, 6), [row(SamplingParams(**params), prompt=prompt, output=output)])
    return torch.nonzero(result_RV[0] > -INF).flatten().tolist()


def test_an_allow_list_leaves_itself_and_changes_no_logit() -> None:
    assert kept(DEFAULT, FLAT, allowed_token_ids=(4, 1, 4)) == [1, 4]
    logits_RV = torch.tensor([[3.0, -2.0, math.nan, INF]])
    found_RV = step("allowed_tokens", 4).apply(logits_RV, [row(SamplingParams(allowed_token_ids=(1, 0)))])
    assert found_RV.tolist() == [[3.0, -2.0, -INF, -INF]]


def test_an_empty_allow_list_and_an_empty_word_are_refused() -> None:
    for wrong in ({"allowed_token_ids": ()}, {"bad_words_ids": ((),)}):
        with pytest.raises(ValueError, match="at least 1 item"):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ((), {5}),
        ((1,), {5, 2}),
        ((1, 1), {5, 2}),
        ((2, 1), {5, 2}),
        ((1, 2), {5, 3}),
        ((2, 2), {5}),
        ((0, 1, 2), {5, 3}),
    ],
)
def test_the_last_token_of_a_word_is_banned_behind_the_others(output: tuple[int, ...], banned: set[int]) -> None:
    words = ((5,), (1, 2), (1, 2, 3))
    assert left("bad_words", output, bad_words_ids=words) == sorted(set(range(6)) - banned)


def test_the_prompt_may_be_completed_to_a_bad_word() -> None:
    assert left("bad_words", prompt=(0, 1), bad_words_ids=((1, 2),)) == list(range(6))


@pytest.mark.parametrize(("length", "banned"), [(0, {1, 3, 4}), (2, {1, 3, 4}), (3, set()), (9, set())])
def test_min_tokens_bans_every_eos_and_stop_token_of_a_short_output(length: int, banned: set[int]) -> None:
    found = left("min_tokens", (0,) * length, (1, 3), (0,) * 7, min_tokens=3, stop_token_ids=(4, 3))
    assert found == sorted(set(range(6)) - banned)


def test_ignore_eos_does_not_change_which_ids_min_tokens_bans() -> None:
    assert left("min_tokens", eos=(1, 3), min_tokens=1, ignore_eos=True) == [0, 2, 4, 5]


def test_an_eos_that_the_head_does_not_have_is_no_error() -> None:
    assert left("min_tokens", eos=(1, 6, 900), min_tokens=1) == [0, 2, 3, 4, 5]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens 9 is above max_tokens 8; lower it"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_bias_is_added_and_is_no_mask() -> None:
    one = step("logit_bias", 6)
    logits_RV = torch.tensor([[1.0, -INF, 2.0, 3e38, -3e38, 0.0]])
    params = SamplingParams(logit_bias={0: 100.0, 1: 100.0, 3: 1e300, 4: -1e300, 5: -100.0})
    found = one.apply(logits_RV, [row(params)])[0].tolist()
    largest = torch.finfo(torch.float32).max
    assert found == [101.0, -INF, 2.0, largest, -largest, -100.0]
    assert step("logit_bias", 6).is_active(SamplingParams(logit_bias={2: 0.0})) is False


def test_a_bias_comes_as_json_with_keys_of_text() -> None:
    assert SamplingParams.model_validate_json('{"logit_bias": {"7": -1}}').logit_bias == {7: -1.0}
    assert SamplingParams(logit_bias={"0": 1, "-12": 2, 3: 4}).logit_bias == {0: 1.0, -12: 2.0, 3: 4.0}  # type: ignore[dict-item]
    for key in (True, False, 7.0, " 7 ", "7 ", "07", "+7", "-0", "7.0", "1e2", "1_0", "٧", "", "9" * 19, None):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias={key: 1.0})  # type: ignore[dict-item]
    for wrong in ({"x": 1.0}, {1: "1"}, {1: math.inf}, {1: math.nan}):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)  # type: ignore[arg-type]


def test_a_ban_wins_over_the_largest_bias() -> None:
    ban = {"bad_words_ids": ((2,),), "logit_bias": {2: 1e300, 0: -1e300}}
    assert kept(DEFAULT, [0.0, -INF, 0.0], **ban) == [0]


def test_rows_of_a_batch_have_masks_of_their_own() -> None:
    rows = [
        row(SamplingParams(min_tokens=2, stop_token_ids=(0,))),
        row(SamplingParams(min_tokens=2), output=(1,)),
        row(SamplingParams(min_tokens=1, stop_token_ids=(0,)), output=(1,)),
    ]
    found_RV = step("min_tokens", 3, (2,)).apply(torch.zeros(3, 3), rows)
    assert (found_RV == -INF).tolist() == [[True, False, True], [False, False, True], [False, False, False]]
