"""Every attention with every KV manager in every KV format and dtype gives the reference tokens, or is refused.

The components are those that are installed. The reference is transformers in float32, on the weights as the dtype
rounds them, with a cache that gives back what the format stores. Rounding on the way must not decide, so of many
prompts those whose best logits stand out are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_format_cases import FORMATS, greedy

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.assembly.registry import list_entries
from pluglm.kernel.errors import IncompatibleError

NUM_TOKENS = 8
PROMPT_LENGTHS = (9, 2, 17)  # a step computes 8 tokens
NUM_CANDIDATES = 64
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = [entry.name for entry in list_entries("attention")]
MANAGERS = [entry.name for entry in list_entries("kv")]
KERNELS = ("native", "tiled", "torch", "triton")


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path]) -> Path:
    """Weights small enough that bfloat16 changes its logits by a few parts in a thousand only."""
    return make_tiny_model("clear-formats", initializer_range=0.1)


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[str, str], list[tuple[list[int], list[int]]]]:
    """(prompt, greedy tokens) by dtype and format."""
    from transformers import LlamaForCausalLM

    def load(dtype: str) -> Any:
        return LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).float().eval()

    def clearest(plain: Any, length: int, kv_format: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        prompts_CP = torch.randint(1, plain.config.vocab_size, (NUM_CANDIDATES, length), generator=generator)
        scores = greedy(plain, prompts_CP, NUM_TOKENS, kv_format).scores
        best_TC2 = torch.stack(scores).topk(2).values
        return prompts_CP[(best_TC2[..., 0] - best_TC2[..., 1]).amin(0).argmax()]

    plain = load("float32")
    prompts = {one: [clearest(plain, length, one) for length in PROMPT_LENGTHS] for one in FORMATS}
    known: dict[tuple[str, str], list[tuple[list[int], list[int]]]] = {}

    def tokens(dtype: str, kv_format: str) -> list[tuple[list[int], list[int]]]:
        if (dtype, kv_format) not in known:
            rounded, found = load(dtype), []
            for prompt in prompts[kv_format]:
                whole = greedy(rounded, prompt[None], NUM_TOKENS, kv_format).sequences[0].tolist()
                found.append((whole[: len(prompt)], whole[len(prompt) :]))
            known[dtype, kv_format] = found
        return known[dtype, kv_format]

    return tokens


def run_config(model: Path, attention: dict[str, str], kv: str, kv_format: str, dtype: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {"path": str(model), "dtype": dtype},
            "backend": "cpu",
            "attention": attention,
            "kv": kv,
            "kv_format": kv_format,
            "engine": {"max_step_tokens": 8, "num_threads": 1, "max_num_seqs": 2},
        }
    )


def check(config: RunConfig, expected: list[tuple[list[int], list[int]]]) -> None:
    with Engine.from_config(config) as engine:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in expected], params)
    assert [(output.token_ids, output.error) for output in outputs] == [(tokens, None) for _, tokens in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_reference_tokens(
    attention: str, kv: str, kv_format: str, dtype: str, model: Path, reference: Callable[[str, str], Any]
) -> None:
    check(run_config(model, {"use": attention}, kv, kv_format, dtype), reference(dtype, kv_format))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("attention", ["flash", "paged"])
def test_every_kernel_gives_them_or_says_why_not(
    attention: str, kernel: str, kv_format: str, model: Path, reference: Callable[[str, str], Any]
) -> None:
    config = run_config(model, {"use": attention, "kernel": kernel}, "paged", kv_format, "float32")
    reasons = {"native": "keys and values in the run's dtype", "triton": "it runs on CUDA devices, not on cpu"}
    if kernel in reasons:
        with pytest.raises(IncompatibleError, match=reasons[kernel]):
            Engine.from_config(config)
        return
    check(config, reference("float32", kv_format))


def test_the_matrix_is_not_empty() -> None:
    assert {"flash", "naive", "paged", "sdpa"} <= set(ATTENTIONS)
    assert {"contiguous", "hash_prefix", "paged", "radix", "window_paged"} <= set(MANAGERS)
    assert {"fp8", "int8"} <= set(FORMATS)
