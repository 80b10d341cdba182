"""Each family against transformers 5 in float32: prefill, decode, greedy tokens, chunks, batches.

Authority: the family's own modeling file in transformers, run on the same random weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama all heads": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama wide heads": ("llama", {"head_dim": 20}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama relu": ("llama", {"hidden_act": "relu"}),
    "llama swish": ("llama", {"hidden_act": "swish", "rms_norm_eps": 1e-2}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral window 2": ("mistral", {"sliding_window": 2}),
    "mistral full": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 late windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2 layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
    "qwen3 windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12}),
    "gemma3 all global": ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    "gemma3 all local": ("gemma3_text", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5}),
    "gemma3 untied, biases": (
        "gemma3_text",
        {"tie_word_embeddings": False, "attention_bias": True, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "gemma3 final cap": ("gemma3_text", {"final_logit_softcapping": 3.0, "sliding_window": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_prefill_decode_and_greedy_equal_transformers(kit: Any, case: str) -> None:
    family, config = CASES[case]
    pair = kit.build(family, **config)
    kit.assert_same_as_transformers(pair, kit.prompt(19))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_chunks_and_batch_mates_change_nothing(kit: Any, family: str) -> None:
    pair = kit.build(family, seed=3, sliding_window=6)
    first, second = kit.prompt(17, seed=1), kit.prompt(9, seed=2)
    session = kit.Session(pair.load())
    rows = [session.step([(1, first[:5], 0), (2, second[:1], 0)])]
    rows += [session.step([(2, second[1:], 1), (1, first[5:6], 5)])[::-1]]
    rows += [session.step([(1, first[6:], 6)])]
    ours = torch.cat([step[0] for step in rows])
    torch.testing.assert_close(ours, pair.reference_logits(first), atol=2e-4, rtol=0)
    mate = torch.cat([step[1] for step in rows[:2]])
    torch.testing.assert_close(mate, pair.reference_logits(second), atol=2e-4, rtol=0)


def test_attention_soft_cap_of_gemma_follows_the_formula(kit: Any) -> None:
    """transformers' Gemma 3 never applies the key, so the expected value is its eager attention given the cap."""
    ALL_ATTENTION_FUNCTIONS.register("eager_capped", partial(eager_attention_forward, softcap=0.7))
    pair = kit.build("gemma3_text", attn_logit_softcapping=0.7, sliding_window=6)
    uncapped = pair.reference_logits(kit.prompt(11))
    ALL_MASK_ATTENTION_FUNCTIONS.register("eager_capped", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    pair.reference.config._attn_implementation = "eager_capped"
    expected = pair.reference_logits(kit.prompt(11))
    (ours,) = pair.session().step([(1, kit.prompt(11), 0)])
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
    assert (expected - uncapped).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_bfloat16_stays_as_close_to_float32_as_transformers_does(kit: Any, family: str) -> None:
    pair = kit.build(family, sliding_window=6, tie_word_embeddings=True)
    prompt = kit.prompt(12)
    exact = pair.reference_logits(prompt)
    (ours,) = kit.Session(pair.load(dtype=torch.bfloat16)).step([(1, prompt, 0)])
    pair.reference.to(torch.bfloat16)
    theirs = pair.reference_logits(prompt).float()
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()
