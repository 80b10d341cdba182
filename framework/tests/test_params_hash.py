"""Sampling parameters are values: equal ones are one key, also with a dictionary among them."""

from __future__ import annotations

from pluglm import SamplingParams


def test_equal_params_are_one_key_and_others_are_not() -> None:
    biased = [SamplingParams(logit_bias={7: 1.5}, seed=3) for _ in range(2)]
    searches = [SamplingParams(temperature=0.0, search={"width": 2}) for _ in range(2)]
    assert len({*biased, *searches, SamplingParams(), SamplingParams(top_k=4)}) == 4
