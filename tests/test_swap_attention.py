"""Every attention with every KV manager in every dtype gives the reference tokens, or is refused with a reason.

The components are those that are installed. The reference is transformers in float32, on the weights as the dtype
rounds them. Rounding on the way must not decide, so of many prompts those whose best logits stand out are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.assembly.registry import list_entries

NUM_TOKENS = 8
PROMPT_LENGTHS = (9, 2, 17)  # a step computes 8 tokens
NUM_CANDIDATES = 64
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = [entry.name for entry in list_entries("attention")]
MANAGERS = [entry.name for entry in list_entries("kv")]


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path]) -> Path:
    """Weights small enough that bfloat16 changes its logits by a few parts in a thousand only."""
    return make_tiny_model("clear", initializer_range=0.1)


def greedy(model: Any, prompts: torch.Tensor) -> Any:
    return model.generate(
        prompts,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
    )


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[str], list[tuple[list[int], list[int]]]]:
    """(prompt, greedy tokens) by dtype."""
    from transformers import LlamaForCausalLM

    def load(dtype: str) -> Any:
        return LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).float().eval()

    def clearest(plain: Any, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        prompts_CP = torch.randint(1, plain.config.vocab_size, (NUM_CANDIDATES, length), generator=generator)
        best_TC2 = torch.stack(greedy(plain, prompts_CP).scores).topk(2).values
        return prompts_CP[(best_TC2[..., 0] - best_TC2[..., 1]).amin(0).argmax()]

    plain = load("float32")
    prompts = [clearest(plain, length) for length in PROMPT_LENGTHS]
    known: dict[str, list[tuple[list[int], list[int]]]] = {}

    def tokens(dtype: str) -> list[tuple[list[int], list[int]]]:
        if dtype not in known:
            rounded = load(dtype)
            outputs = [greedy(rounded, prompt[None]).sequences[0, len(prompt) :] for prompt in prompts]
            known[dtype] = [(one.tolist(), other.tolist()) for one, other in zip(prompts, outputs, strict=True)]
        return known[dtype]

    return tokens


def check(model: Path, attention: dict[str, str], kv: str, dtype: str, expected: Any) -> None:
    data = {
        "model": {"path": str(model), "dtype": dtype},
        "backend": "cpu",
        "attention": attention,
        "kv": kv,
        "engine": {"max_step_tokens": 8, "num_threads": 1, "max_num_seqs": 2},
    }
    with Engine.from_config(RunConfig.from_dict(data)) as engine:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in expected], params)
    assert [(output.token_ids, output.error) for output in outputs] == [(tokens, None) for _, tokens in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_reference_tokens(attention: str, kv: str, dtype: str, model: Path, reference: Callable[[str], Any]) -> None:
    check(model, {"use": attention}, kv, dtype, reference(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["tiled", "torch"])
@pytest.mark.parametrize("attention", ["flash", "paged"])
def test_other_kernels(attention: str, kernel: str, dtype: str, model: Path, reference: Callable[[str], Any]) -> None:
    check(model, {"use": attention, "kernel": kernel}, "paged", dtype, reference(dtype))


def test_the_matrix_is_not_empty() -> None:
    assert {"flash", "naive", "paged", "sdpa"} <= set(ATTENTIONS)
    assert {"contiguous", "hash_prefix", "paged", "radix", "window_paged"} <= set(MANAGERS)
