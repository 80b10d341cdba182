"""The steps that the transformers library has, too, keep what its warpers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampler_cases import row, transformed

from pluglm.kernel.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers")

CASES: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = [
    ("top_k", {"top_k": 7}, "TopKLogitsWarper", (7,)),
    ("top_p", {"top_p": 0.8}, "TopPLogitsWarper", (0.8,)),
    ("min_p", {"min_p": 0.07}, "MinPLogitsWarper", (0.07,)),
    ("typical_p", {"typical_p": 0.6}, "TypicalLogitsWarper", (0.6,)),
    ("epsilon_cutoff", {"epsilon_cutoff": 0.01}, "EpsilonLogitsWarper", (0.01,)),
    ("eta_cutoff", {"eta_cutoff": 0.02}, "EtaLogitsWarper", (0.02,)),
    ("repetition_penalty", {"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor", (1.3,)),
    ("bad_words", {"bad_words_ids": ((3,), (4, 5))}, "NoBadWordsLogitsProcessor", ([[3], [4, 5]],)),
    ("allowed_tokens", {"allowed_token_ids": (1, 30)}, "PrefixConstrainedLogitsProcessor", (lambda *_: [1, 30], 1)),
    ("min_tokens", {"min_tokens": 9, "stop_token_ids": (6, 8)}, "MinLengthLogitsProcessor", (9, [6, 8])),
    ("temperature", {"temperature": 0.3}, "TemperatureLogitsWarper", (0.3,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "warper", "arguments"), CASES, ids=[case[0] for case in CASES])
def test_equal(name: str, params: dict[str, Any], warper: str, arguments: tuple[Any, ...]) -> None:
    logits_RV = torch.randn(300, 40, generator=torch.Generator().manual_seed(1)) * 3
    output = (9, 12, 9, 4)
    expected_RV = getattr(transformers, warper)(*arguments)(torch.tensor([output] * 300), logits_RV.clone())
    found_RV = transformed([name], logits_RV, [row(SamplingParams(**params), output=output)] * 300)
    assert torch.equal(found_RV > -torch.inf, expected_RV > -torch.inf)
    assert torch.allclose(found_RV.softmax(-1), expected_RV.softmax(-1), atol=1e-6)
