"""Every preset against the float64 oracle on rows made to go wrong: ties, one token alive, tiny temperatures, padding.

Logits and params are binary fractions, so float32 computes with them as float64 does, and ties are ties in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import chain, random_row, transformed
from sampling_oracle import distribution

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.logits_params import MIROSTAT_REPLACES
from pluglm.kernel.interfaces.sampler import NO_TOKEN
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.presets import PRESETS

INF = float("inf")
VOCAB, PADDING = 24, 5
# by name: parameters that are exact in float32, or are compared with sums of probabilities only
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.5, 2.0, 2.0**-16, 0.25), "top_k": (0, 1, 3, 8, 99), "top_p": (1.0, 0.9, 0.37, 0.0),
    "min_p": (0.0, 0.03, 0.4, 1.0), "typical_p": (1.0, 0.9, 0.4), "top_n_sigma": (0.0, 0.7, 1.6),
    "epsilon_cutoff": (0.0, 0.003, 0.1), "eta_cutoff": (0.0, 0.003, 0.1), "xtc_probability": (0.0, 0.5, 1.0),
    "xtc_threshold": (0.11, 0.3), "dynatemp_high": (0.0, 1.5), "repetition_penalty": (1.0, 2.0, 0.5),
    "frequency_penalty": (0.0, 0.5, -0.25), "presence_penalty": (0.0, 1.0, -0.5), "dry_multiplier": (0.0, 1.0),
    "dry_base": (2.0,), "dry_allowed_length": (1, 2), "logit_bias": ({}, {0: 2.5, 3: -1.0}), "min_tokens": (0, 20),
    "stop_token_ids": ((), (2,)), "allowed_token_ids": (None, None, tuple(range(0, 19, 2))),
    "bad_words_ids": ((), ((1,), (4, 6))), "mirostat": (0, 0, 0, 1, 2), "mirostat_tau": (0.5, 1.5),
}  # fmt: skip


def rows_of(preset: Any, seed: int, count: int) -> list[SampleRow]:
    """With random parameters of the preset's steps, and histories that repeat themselves."""
    generator = np.random.default_rng(seed)
    known = {name for one in chain(VOCAB, preset=preset)._steps for name in one.parameters}
    rows = []
    for _ in range(count):
        params = {
            name: values[int(generator.integers(len(values)))]
            for name, values in CHOICES.items()
            if name in known and generator.random() < 0.5
        }
        if params.get("mirostat"):
            params = {name: value for name, value in params.items() if name not in MIROSTAT_REPLACES}
        history = random_row(generator, VOCAB - PADDING)
        rows.append(replace(history, params=SamplingParams(**params), seed=int(generator.integers(99))))
    return rows


def flat(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.full(VOCAB, -3.5)


def coarse(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.asarray(generator.integers(-2, 3, VOCAB) * 0.75)


def two_levels(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.where(generator.random(VOCAB) < 0.4, 1.0, -1.0)


def peaked(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.where(np.arange(VOCAB) == generator.integers(VOCAB - PADDING), 64.0, generator.integers(-8, 8, VOCAB) / 4)


def half_masked(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.where(generator.random(VOCAB) < 0.5, -INF, generator.integers(-16, 16, VOCAB) / 8)


def one_alive(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.where(np.arange(VOCAB) == generator.integers(VOCAB - PADDING), -40.0, -INF)


def two_alive(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.where(np.isin(np.arange(VOCAB), generator.integers(0, VOCAB - PADDING, 2)), 2.0, -INF)


def huge(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.asarray(generator.integers(-3, 4, VOCAB) * 2.0**100)


def far_apart(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.asarray(generator.integers(-6, 7, VOCAB) * 24.0)


SHAPES = (flat, coarse, two_levels, peaked, half_masked, one_alive, two_alive, huge, far_apart)


def compare(preset: Any, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> int:
    """Rows whose kept set and probabilities were compared, that is those where no comparison is close."""
    names = PRESETS[preset]
    found_RV = transformed(names, logits_RV, rows).double()
    num_compared = 0
    for logits_V, found_V, one in zip(logits_RV.double().numpy(), found_RV, rows, strict=True):
        expected, margin = distribution(names, logits_V, one)
        assert not bool((found_V[VOCAB - PADDING :] > -INF).any())
        if margin < 1e-4:
            continue
        kept = found_V.numpy() > -INF
        found = found_V.softmax(-1).nan_to_num(0.0).numpy()
        np.testing.assert_array_equal(kept[expected > 1e-30], True, err_msg=repr(one))
        np.testing.assert_array_equal(expected[~kept], 0.0, err_msg=repr(one))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6, err_msg=repr(one))
        num_compared += 1
    return num_compared


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_kept_sets_and_probabilities(preset: Any, shape: Any) -> None:
    count = 120
    generator = np.random.default_rng(SHAPES.index(shape))
    logits_RV = torch.tensor(np.stack([shape(generator) for _ in range(count)]), dtype=torch.float32)
    logits_RV[:, VOCAB - PADDING :] = -INF  # as the kernel masks what the tokenizer does not know
    rows = rows_of(preset, SHAPES.index(shape), count)
    assert compare(preset, logits_RV, rows) > 0.5 * count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_draws_come_from_what_the_oracle_keeps(preset: Any, shape: Any) -> None:
    """And a row of which it keeps nothing gives no token."""
    count = 80
    generator = np.random.default_rng(SHAPES.index(shape) + 100)
    logits_RV = torch.tensor(np.stack([shape(generator) for _ in range(count)]), dtype=torch.float32)
    logits_RV[:, VOCAB - PADDING :] = -INF
    rows = rows_of(preset, SHAPES.index(shape) + 100, count)
    drawn = chain(VOCAB, preset=preset).sample(logits_RV.clone(), rows)
    for logits_V, one, token in zip(logits_RV.double().numpy(), rows, drawn, strict=True):
        expected, margin = distribution(PRESETS[preset], logits_V, one)
        if not expected.any():
            assert token == NO_TOKEN
        elif margin > 1e-4:
            assert expected[token] > 0
