"""A hundred thousand draws of each preset come from the filtered distribution that the float64 oracle computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import chain, row
from sampling_oracle import STEPS, Row, softmax, without_top_choices

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.statistics import cell_test
from pluglm_samplers.presets import PRESETS

NUM_DRAWS = 100_000
DELTA = 1e-6 / 4  # a sound sampler fails one of the tests here less than once in a million runs
LOGITS = (2.0, 1.7, 1.5, 1.3, 1.0, 0.8, 0.5, 0.2, 0.0, -0.3, -0.6, -1.0, -1.3, -1.7, -2.0, -2.5, -3.0)
COMMON: dict[str, Any] = {
    "temperature": 1.3, "top_k": 11, "top_p": 0.9, "min_p": 0.15, "repetition_penalty": 1.2, "frequency_penalty": 0.2,
    "presence_penalty": 0.1, "logit_bias": {9: 1.5}, "bad_words_ids": ((1,), (3, 2)), "min_tokens": 9,
    "stop_token_ids": (4,), "allowed_token_ids": tuple(range(16)),
}  # fmt: skip
DRY: dict[str, Any] = {"dry_multiplier": 0.4, "dry_allowed_length": 1}
EXTRA: dict[str, dict[str, Any]] = {
    "default": {**DRY, "typical_p": 0.95, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_n_sigma": 1.8,
                "dynatemp_low": 0.7, "dynatemp_high": 1.4, "xtc_probability": 0.4, "xtc_threshold": 0.12},
    "vllm": {},
    "llama.cpp": {**DRY, "typical_p": 0.95, "top_n_sigma": 1.8, "xtc_probability": 0.4, "xtc_threshold": 0.12},
    "joint": {**DRY, "xtc_probability": 0.4, "xtc_threshold": 0.12},
}  # fmt: skip


def law(names: tuple[str, ...], one: SampleRow) -> Row:
    """The mixture of what is drawn from with XTC's coin fired and not."""
    laws = []
    for fires in (True, False):
        logits = np.array(LOGITS)
        for name in names:
            if name != "xtc":
                logits = STEPS[name](logits, one)[0]
            elif fires:
                logits = without_top_choices(logits, one.params.xtc_threshold)[0]
        laws.append(softmax(logits))
    fire = one.params.xtc_probability
    return fire * laws[0] + (1 - fire) * laws[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_draws_follow_the_filtered_distribution(preset: Any) -> None:
    """With all the parameters that it has steps for."""
    params = SamplingParams(**COMMON, **EXTRA[preset])
    one = row(params, prompt=(5, 6, 2), output=(0, 6, 3))
    expected = law(PRESETS[preset], one)
    assert 0 < np.count_nonzero(expected) < len(LOGITS)
    keys = {"params": params, "prompt_token_ids": (5, 6, 2), "output_token_ids": [0, 6, 3], "seed": 20, "lane": 0}
    rows = [SampleRow(**keys, position=position) for position in range(NUM_DRAWS)]  # type: ignore[arg-type]
    with torch.inference_mode():
        drawn = chain(len(LOGITS), preset=preset).sample(torch.tensor(LOGITS).repeat(NUM_DRAWS, 1), rows)
    counts = np.bincount(drawn, minlength=len(LOGITS)).tolist()
    assert cell_test(counts, expected.tolist(), DELTA) is None


@pytest.mark.parametrize("wrong", ["vllm", "llama.cpp", "joint"])
def test_the_test_tells_presets_apart(wrong: Any) -> None:
    """Counts exactly as the default's law fail the law of another preset."""
    one = row(SamplingParams(**COMMON), prompt=(5, 6, 2), output=(0, 6, 3))
    counts = np.round(law(PRESETS["default"], one) * NUM_DRAWS).astype(int).tolist()
    assert cell_test(counts, law(PRESETS["default"], one).tolist(), DELTA) is None
    assert cell_test(counts, law(PRESETS[wrong], one).tolist(), DELTA) is not None
