"""A head with more rows than the tokenizer has ids: what is beyond is never drawn, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ids, real_config, require_idle
from safetensors.torch import load_file, save_file

from pluglm import Engine, SamplingParams

NUM_PADDING = 13
PROMPTS = [(9, 41), (60, 61, 62), (7, 7, 7)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, prompt_logprobs=3),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=5, max_tokens=12, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module")
def padded(tiny_model: Path, make_tiny_model: Callable[..., Path]) -> Path:
    """tiny_model with padding rows that would win nearly every draw, and one of NaN."""
    weights = load_file(tiny_model / "model.safetensors")
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    folder = make_tiny_model("padded", vocab_size=len(head) + NUM_PADDING)
    padding = 20 * torch.randn(NUM_PADDING, head.shape[1], generator=torch.Generator().manual_seed(1))
    padding[3] = torch.nan
    weights["lm_head.weight"] = torch.cat([head, padding])
    weights["model.embed_tokens.weight"] = torch.cat([embedding, torch.full_like(padding, torch.nan)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(model: Path, drafter: Any, preset: str = "default") -> list[Any]:
    config = real_config(model, drafter=drafter, sampler={"use": "chain", "preset": preset})
    with Engine.from_config(config) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], PARAMS)
        assert max(token for output in outputs for token in output.token_ids) < engine.tokenizer.vocab_size
        require_idle(engine)
    return [
        (one.token_ids, one.text, one.finish_reason, one.error, shown(one.logprobs), shown(one.prompt_logprobs[1:]))
        for one in outputs
    ]


def shown(logprobs: Any) -> list[Any]:
    return [(one.token_id, one.rank, sorted(one.top), pytest.approx(one.logprob, abs=1e-5)) for one in logprobs]


def test_padding_would_be_drawn(tiny_model: Path, padded: Path) -> None:
    """By the transformers library, which knows no tokenizer: else the next test could not fail."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(padded, dtype=torch.float32)
    size = model.config.vocab_size - NUM_PADDING
    for prompt in PROMPTS:
        logits_V = model(torch.tensor([prompt])).logits[0, -1].nan_to_num(nan=-torch.inf)
        assert int(logits_V.argmax()) >= size


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_outputs_are_those_of_the_head_without_padding(tiny_model: Path, padded: Path, drafter: Any) -> None:
    assert answers(padded, drafter) == answers(tiny_model, drafter)


@pytest.mark.parametrize("preset", ["vllm", "llama.cpp", "joint"])
def test_other_presets_never_see_padding(tiny_model: Path, padded: Path, preset: str) -> None:
    assert answers(padded, None, preset) == answers(tiny_model, None, preset)
