"""Presets: one request means four sets in four of them, each holds the order it is named for and refuses the rest."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sampler_cases import chain, kept, row
from sampling_oracle import distribution

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.chain import DEFAULT_STEPS, ChainConfig
from pluglm_samplers.presets import PRESETS

# docs/sampling.md works this one out
PROBABILITIES = (0.40, 0.20, 0.12, 0.10, 0.08, 0.05, 0.03, 0.02)
PARAMS: dict[str, Any] = {"temperature": 2.0, "top_k": 6, "top_p": 0.7, "min_p": 0.4}
KEPT = {"default": 4, "vllm": 3, "llama.cpp": 2, "joint": 5}


@pytest.mark.parametrize("preset", PRESETS)
def test_one_request_keeps_four_sets(preset: Any) -> None:
    logits = [math.log(one) for one in PROBABILITIES]
    expected, margin = distribution(PRESETS[preset], np.array(logits), row(SamplingParams(**PARAMS)))
    assert margin > 1e-3
    assert np.flatnonzero(expected).tolist() == list(range(KEPT[preset]))
    assert kept(PRESETS[preset], logits, **PARAMS) == list(range(KEPT[preset]))


def names(**config: Any) -> tuple[str, ...]:
    return tuple(one.use for one in ChainConfig.model_validate(config).steps)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_steps(preset: Any) -> None:
    config = ChainConfig(preset=preset)
    assert names(preset=preset) == PRESETS[preset]
    assert ChainConfig.model_validate(config.model_dump()) == config  # what `config show` prints is the same config
    assert chain(5, preset=preset)._names == list(PRESETS[preset])


def test_the_default_is_the_preset_of_that_name() -> None:
    assert names() == names(preset="default") == DEFAULT_STEPS == PRESETS["default"]


def test_an_order_of_ones_own_goes_without_a_preset() -> None:
    assert names(steps=["top_k"]) == names(preset=None, steps=["top_k"]) == ("top_k",)
    for preset in PRESETS:
        assert names(preset=preset, steps=PRESETS[preset]) == PRESETS[preset]  # as `config show` prints it
        with pytest.raises(ValidationError, match=f"preset {preset} has steps of its own; leave out preset or steps"):
            ChainConfig.model_validate({"preset": preset, "steps": ["top_k"]})
    for wrong in ("VLLM", "", ["vllm"]):
        with pytest.raises(ValidationError, match="preset"):
            ChainConfig.model_validate({"preset": wrong})


def test_orders_are_those_of_the_engines() -> None:
    """Sources: vLLM V1's sampler and llama.cpp's default sampler chain, as read in their code."""

    def order(preset: Any, *wanted: str) -> bool:
        places = [PRESETS[preset].index(name) for name in wanted]
        return places == sorted(places)

    masks = ("allowed_tokens", "bad_words", "min_tokens", "logit_bias")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    assert order("default", *masks, *penalties, "dry", "temperature", "dynamic_temperature", "top_n_sigma", "top_k",
                 "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "xtc")  # fmt: skip
    assert order("vllm", *masks, *penalties, "temperature", "min_p", "top_k", "top_p")
    assert order("llama.cpp", *masks, *penalties, "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc",
                 "temperature")  # fmt: skip
    assert order("joint", *masks, *penalties, "dry", "temperature", "top_k_top_p", "min_p")


def test_every_preset_starts_with_the_hard_masks() -> None:
    assert all(steps[:3] == ("allowed_tokens", "bad_words", "min_tokens") for steps in PRESETS.values())


@pytest.mark.parametrize(
    ("preset", "params", "named"),
    [
        ("vllm", {"dry_multiplier": 0.5}, "dry_multiplier=0.5"), ("vllm", {"typical_p": 0.5}, "typical_p=0.5"),
        ("vllm", {"xtc_probability": 0.5}, "xtc_probability=0.5"), ("vllm", {"dynatemp_high": 2.0}, "dynatemp_high"),
        ("llama.cpp", {"eta_cutoff": 0.1}, "eta_cutoff=0.1"), ("llama.cpp", {"epsilon_cutoff": 0.1}, "epsilon_cutoff"),
        ("vllm", {"logit_bias": {1: 2.0}}, None), ("llama.cpp", {"dry_multiplier": 0.5}, None),
        ("joint", {"top_k": 3, "top_p": 0.5}, None),
    ],
)  # fmt: skip
def test_what_a_preset_lacks_is_refused_by_name(preset: str, params: dict[str, Any], named: str | None) -> None:
    reason = chain(5, preset=preset).check(SamplingParams(**params))
    assert (reason is None) if named is None else (reason is not None and reason.startswith(named))


def test_greedy_is_the_argmax_behind_the_penalties_in_every_preset() -> None:
    """The best token is banned, the next one penalised; every truncation would keep token 3 alone or drop it."""
    greedy = SamplingParams(
        temperature=1e-6, bad_words_ids=((0,),), presence_penalty=3.0, typical_p=0.1, top_k=1, xtc_probability=1.0,
        top_p=0.1, min_p=1.0, epsilon_cutoff=0.9,
    )  # fmt: skip
    logits = [[9.0, 8.0, 1.0, 5.5, 5.0]]
    for preset in PRESETS:
        assert chain(5, preset=preset).sample(torch.tensor(logits), [row(greedy, output=(1,))]) == [3]


def table(heading: str) -> dict[str, str]:
    """First cell to second of a table in docs/sampling.md."""
    text = (Path(__file__).parents[3] / "docs/sampling.md").read_text(encoding="utf-8")
    lines = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return {row[0].strip(" `"): row[1].strip() for row in cells}


def test_the_page_about_sampling_is_true() -> None:
    orders = {name: tuple(re.findall(r"`(\w+)`", steps)) for name, steps in table("Presets").items()}
    assert orders == PRESETS
    assert {name: int(count) for name, count in table("One request, four sets").items()} == KEPT
