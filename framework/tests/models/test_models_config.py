"""What config.json keys mean: the spec of each family, defaults, and refusals that name file and key.

Authority: the configuration classes of transformers 5 (defaults, layer kinds) and its sliding-window mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import sliding_window_causal_mask_function

from pluglm.kernel.errors import CheckpointError
from pluglm.models.gemma3 import Gemma3Model
from pluglm.models.llama import LlamaModel
from pluglm.models.mistral import MistralModel
from pluglm.models.qwen2 import Qwen2Model
from pluglm.models.qwen3 import Qwen3Model

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 6}

# family, extra keys, what of the spec they decide, expected value
TABLE: list[tuple[type[Any], dict[str, Any], str, Any]] = [
    (LlamaModel, {}, "head_dim", 16),
    (LlamaModel, {"head_dim": 24}, "head_dim", 24),
    (LlamaModel, {"head_dim": None}, "head_dim", 16),
    (LlamaModel, {"num_key_value_heads": None}, "num_kv_heads", 4),
    (LlamaModel, {}, "scale", 0.25),
    (LlamaModel, {}, "windows", [None] * 8),
    (LlamaModel, {"unknown_key": 1, "pretraining_tp": 2}, "max_position", 512),
    (LlamaModel, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position", 1024),
    (LlamaModel, {"rope_scaling": YARN}, "max_position", 2048),
    (LlamaModel, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "max_position", 512),
    (MistralModel, {}, "windows", [4096] * 8),
    (MistralModel, {"sliding_window": None}, "windows", [None] * 8),
    (MistralModel, {"sliding_window": 9}, "windows", [9] * 8),
    (Qwen2Model, {"sliding_window": 9}, "windows", [None] * 8),
    (Qwen2Model, QWEN_WINDOW, "windows", [None] * 6 + [9] * 2),
    (Qwen3Model, {}, "head_dim", 128),
    (Qwen3Model, QWEN_WINDOW, "windows", [None] * 6 + [9] * 2),
    (Gemma3Model, {}, "windows", [4096] * 5 + [None] + [4096] * 2),
    (Gemma3Model, {"sliding_window": 7, "sliding_window_pattern": 2}, "windows", [7, None] * 4),
    (Gemma3Model, {}, "head_dim", 256),
    (Gemma3Model, {}, "scale", 0.0625),
    (Gemma3Model, {"query_pre_attn_scalar": 4}, "scale", 0.5),
    (Gemma3Model, {"attn_logit_softcapping": 50.0}, "soft_cap", 50.0),
    (Gemma3Model, {"text_config": BASE | {"head_dim": 32}}, "head_dim", 32),
]


@pytest.mark.parametrize(("family", "extra", "what", "expected"), TABLE)
def test_key_decides_the_spec(family: type[Any], extra: dict[str, Any], what: str, expected: Any) -> None:
    spec = family.read_spec(BASE | extra)
    got = {
        "windows": [layer.window for layer in spec.layers],
        "max_position": spec.max_position,
        "head_dim": spec.layers[0].head_dim,
        "num_kv_heads": spec.layers[0].num_kv_heads,
        "scale": spec.layers[0].scale,
        "soft_cap": spec.layers[0].soft_cap,
    }
    assert got[what] == expected


def test_the_window_counts_the_query_itself_as_in_transformers() -> None:
    window = MistralModel.read_spec(BASE | {"sliding_window": 5}).layers[0].window
    sees = sliding_window_causal_mask_function(5)
    assert [key for key in range(30) if sees(0, 0, torch.tensor(20), torch.tensor(key))] == list(
        range(20 - window + 1, 21)
    )


@pytest.mark.parametrize(
    ("family", "config_name"),
    [
        (LlamaModel, "LlamaConfig"),
        (MistralModel, "MistralConfig"),
        (Qwen2Model, "Qwen2Config"),
        (Qwen3Model, "Qwen3Config"),
        (Gemma3Model, "Gemma3TextConfig"),
    ],
)
def test_keys_left_out_mean_what_transformers_fills_in(family: type[Any], config_name: str) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {} if family is Gemma3Model else {key: BASE[key] for key in required} | {"num_attention_heads": 32}
    filled = getattr(transformers, config_name)(**given)
    spec = family.read_spec(given)
    assert spec.layers[0].num_kv_heads == filled.num_key_value_heads
    head_dim = getattr(filled, "head_dim", None) or filled.hidden_size // filled.num_attention_heads
    assert spec.layers[0].head_dim == head_dim
    assert spec.max_position == filled.max_position_embeddings
    assert spec.vocab_size == filled.vocab_size


REFUSALS: list[tuple[type[Any], dict[str, Any], str]] = [
    (LlamaModel, {"hidden_act": "mish"}, "key 'hidden_act' is 'mish', which is not supported; supported: gelu, "),
    (Gemma3Model, {"hidden_activation": "x"}, "key 'hidden_activation' is 'x', which is not supported"),
    (LlamaModel, {"hidden_size": None}, "key 'hidden_size' is missing"),
    (LlamaModel, {"hidden_size": "64"}, "key 'hidden_size' is '64'; a whole number of at least 1 is needed"),
    (LlamaModel, {"num_hidden_layers": 0}, "key 'num_hidden_layers' is 0; a whole number of at least 1"),
    (LlamaModel, {"num_hidden_layers": True}, "key 'num_hidden_layers' is True"),
    (
        LlamaModel,
        {"num_hidden_layers": 10**9},
        "key 'num_hidden_layers' is 1000000000; a whole number of at most 10000",
    ),
    (LlamaModel, {"hidden_size": 10**30}, "a whole number of at most 281474976710656 is needed"),
    (LlamaModel, {"rms_norm_eps": 10**400}, "a number above 0 is needed"),
    (
        LlamaModel,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}},
        "key 'rope_scaling.rope_theta' must be above 1",
    ),
    (LlamaModel, {"num_key_value_heads": 3}, "key 'num_key_value_heads' is 3; it must divide the 4 query heads"),
    (LlamaModel, {"head_dim": 15}, "is 15; rotary embeddings need an even one"),
    (LlamaModel, {"rms_norm_eps": -1.0}, "key 'rms_norm_eps' is -1.0; a number above 0 is needed"),
    (LlamaModel, {"attention_bias": "yes"}, "key 'attention_bias' is 'yes'; true or false is needed"),
    (LlamaModel, {"quantization_config": {"quant_method": "gptq"}}, "key 'quantization_config' says"),
    (Gemma3Model, {"quantization_config": {}, "text_config": BASE}, "key 'quantization_config' says"),
    (LlamaModel, {"num_local_experts": 8}, "key 'num_local_experts' is 8; mixtures of experts"),
    (Qwen3Model, {"num_experts": 128}, "key 'num_experts' is 128; mixtures of experts"),
    (LlamaModel, {"rope_interleaved": True}, "key 'rope_interleaved' is true, which is not supported"),
    (LlamaModel, {"partial_rotary_factor": 0.5}, "partial_rotary_factor' is not 1"),
    (LlamaModel, {"rope_scaling": {"rope_type": "longrope"}}, "key 'rope_scaling.rope_type' is 'longrope'"),
    (MistralModel, {"layer_types": ["full_attention"] * 8}, "key 'layer_types' is set; Mistral uses one kind"),
    (MistralModel, {"sliding_window": 0}, "key 'sliding_window' is 0"),
    (Qwen2Model, {"layer_types": ["sliding_attention"] * 8}, "key 'sliding_window' is not set, but layer_types"),
    (Qwen2Model, {"layer_types": ["full_attention"] * 7}, "key 'layer_types' is not a list of 8 entries"),
    (Qwen3Model, {"layer_types": ["chunked"] * 8}, "key 'layer_types' has the entry 'chunked'"),
    (Gemma3Model, {"use_bidirectional_attention": True}, "key 'use_bidirectional_attention' is true"),
    (Gemma3Model, {"rope_parameters": {"rope_type": "default"}}, "key 'rope_parameters' has neither full_attention"),
    (Gemma3Model, {"text_config": BASE | {"head_dim": "a"}}, "key 'text_config.head_dim' is 'a'"),
    (Gemma3Model, {"text_config": 3}, "key 'text_config' is 3; a table is needed"),
]


@pytest.mark.parametrize(("family", "extra", "message"), REFUSALS)
def test_refusal_names_the_file_and_the_key_in_one_line(family: type[Any], extra: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        family.read_spec(BASE | extra)
    text = str(caught.value)
    assert text.startswith("config.json: key '")
    assert message in text
    assert "\n" not in text


def test_loading_names_the_file_itself(kit: Any, tmp_path: Path) -> None:
    for path, shown in ((tmp_path, tmp_path / "config.json"), (Path("m.gguf"), Path("m.gguf"))):
        checkpoint = kit.MemoryCheckpoint(BASE | {"hidden_act": "mish"}, {}, path=path)
        with pytest.raises(CheckpointError, match="hidden_act") as caught:
            LlamaModel.load(checkpoint, kit.context())
        assert str(caught.value).startswith(f"{shown}: key ")
        assert checkpoint.reads == []


def test_the_spec_counts_kv_values(kit: Any) -> None:
    """Two tensors of 2 heads of 16 values, in each of 8 layers."""
    assert LlamaModel.read_spec(BASE).kv_values_per_token == 2 * 2 * 16 * 8
