"""Families on checkpoints from disk: as transformers saves them, and the published SmolLM2 GGUF.

Authority: the same weights in transformers, float32.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.models.gemma3 import Gemma3Model
from pluglm.models.llama import LlamaModel
from pluglm.weights.open import open_checkpoint
from pluglm.weights.packaged import smollm2_135m_instruct

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_by_transformers(kit: Any, tmp_path: Path, family: str, tied: bool) -> None:
    pair = kit.build(family, tie_word_embeddings=tied)
    pair.reference.save_pretrained(tmp_path)
    with closing(open_checkpoint(tmp_path)) as pair.checkpoint:
        kit.assert_same_as_transformers(pair, kit.prompt(9), num_tokens=3)


def test_the_text_part_of_a_saved_multimodal_gemma(kit: Any, tmp_path: Path) -> None:
    text = kit.build("gemma3_text", sliding_window=6, sliding_window_pattern=2).reference.config
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    reference.save_pretrained(tmp_path)
    prompt = [token for token in kit.prompt(15) if token != 96]
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        pair = kit.Pair(Gemma3Model, reference, checkpoint)
        (ours,) = pair.session().step([(1, prompt, 0)])
    expected = pair.reference_logits(prompt)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


def test_the_published_smollm2(kit: Any) -> None:
    """Both sides get the tensors that the GGUF reader dequantises; the reader has its own tests."""
    prompt = [1, 504, 5575, 282, 4649, 314]
    with closing(open_checkpoint(smollm2_135m_instruct())) as checkpoint:
        pair = kit.Pair(LlamaModel, reference_of(checkpoint), checkpoint)
        (ours,) = pair.session().step([(1, prompt, 0)])
    expected = pair.reference_logits(prompt)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


def reference_of(checkpoint: Checkpoint) -> Any:
    """transformers' Llama over the checkpoint's tensors, without initialising weights of its own first."""
    config = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    reference.load_state_dict(weights, strict=False, assign=True)
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    return reference
