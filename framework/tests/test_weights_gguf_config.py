"""GGUF metadata as a Hugging Face config: sizes, rotary scaling, token ids, Gemma 3, unknown architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.gguf import GGUFCheckpoint

SIZES: dict[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 128,
    "block_count": 2,
    "context_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}


def write(
    folder: Path,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    roots: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A file with `SIZES`, changed by `keys` (None removes one), and three or more tensors."""
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    everything = {f"{architecture}.{key}": value for key, value in (SIZES | (keys or {})).items()} | (roots or {})
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in everything.items():
        if value is not None:
            adders[type(value)](key, value)
    names = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight")
    writer.add_tensor("token_embd.weight", np.ones((50, 64), np.float32))
    for name, data in ({name: np.ones(64, np.float32) for name in names} | (tensors or {})).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def config_of(path: Path) -> dict[str, Any]:
    checkpoint = GGUFCheckpoint(path)
    checkpoint.close()
    assert checkpoint.generation_config == {}
    return dict(checkpoint.config)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("mistral3", "mistral")],
)
def test_sizes_of_known_architectures(tmp_path: Path, architecture: str, model_type: str) -> None:
    config = config_of(write(tmp_path, architecture))
    expected = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": 50,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }
    assert config == expected | ({"sliding_window": None} if model_type == "mistral" else {})


def test_optional_keys(tmp_path: Path) -> None:
    keys = {"attention.head_count_kv": None, "rope.freq_base": None, "attention.key_length": 24}
    keys |= {"attention.value_length": 24, "rope.dimension_count": 12, "attention.sliding_window": 99}
    config = config_of(write(tmp_path, keys=keys))
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10000.0
    assert config["head_dim"] == 24
    assert config["partial_rotary_factor"] == 0.5
    assert config["sliding_window"] == 99


@pytest.mark.parametrize(
    ("ids", "expected"),
    [({"eos": 2}, 2), ({"eos": 2, "eot": 7, "eom": 2}, [2, 7]), ({"eos": 2, "eot": 7, "eom": 8}, [2, 7, 8])],
)
def test_end_tokens(tmp_path: Path, ids: dict[str, int], expected: Any) -> None:
    roots = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    config = config_of(write(tmp_path, roots=roots | {"tokenizer.ggml.bos_token_id": 0}))
    assert config["eos_token_id"] == expected
    assert config["bos_token_id"] == 0


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_of(write(tmp_path, keys=linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 16.0}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    assert config_of(write(tmp_path, keys=yarn))["rope_scaling"] == expected
    yarn["rope.scaling.attn_factor"] = 0.5  # ggml multiplies by it: 0.5 (1 + 0.1 ln 4)
    assert config_of(write(tmp_path, keys=yarn))["rope_scaling"]["attention_factor"] == pytest.approx(0.5693147)
    other = {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}
    assert config_of(write(tmp_path, keys=other))["rope_scaling"] == {"rope_type": "longrope", "factor": 4.0}
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert config_of(write(tmp_path, keys=none))["rope_scaling"] is None


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, factor: float, original: int) -> None:
    """transformers makes the divisors (its inverse frequencies, unscaled over scaled); the table must come back."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    divisors = (plain / scaled).numpy()
    assert divisors.max() == pytest.approx(factor)
    got = config_of(write(tmp_path, tensors={"rope_freqs.weight": divisors}))["rope_scaling"]
    assert got == {key: value for key, value in rope.items() if key != "rope_theta"}


def test_other_divisors_are_named_and_kept(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, 8, dtype=np.float32)
    checkpoint = GGUFCheckpoint(write(tmp_path, tensors={"rope_freqs.weight": divisors}))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "freq_factors", "tensor": "rope_freqs.weight"}
    assert np.array_equal(checkpoint.tensor("rope_freqs.weight", torch.float32).numpy(), divisors)
    checkpoint.close()
    ones = write(tmp_path, tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert config_of(ones)["rope_scaling"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_impossible_divisors_are_refused(tmp_path: Path, bad: float) -> None:
    path = write(tmp_path, tensors={"rope_freqs.weight": np.array([1, bad], np.float32)})
    with pytest.raises(CheckpointError, match="divisors that are not finite"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(("layers", "scalar"), [(12, 32), (62, 16)], ids=["all but 27B", "27B"])
def test_gemma3(tmp_path: Path, layers: int, scalar: int) -> None:
    keys = {"block_count": layers, "attention.sliding_window": 8, "attention.key_length": 32, "rope.freq_base": None}
    tensors = {f"blk.{layer}.ffn_norm.weight": np.ones(64, np.float32) for layer in range(layers)}
    config = config_of(write(tmp_path, "gemma3", keys, tensors=tensors))
    assert config["model_type"] == "gemma3_text"
    assert config["rope_theta"] == 1_000_000.0
    assert config["rope_local_base_freq"] == 10000.0
    assert config["sliding_window"] == 8
    assert config["sliding_window_pattern"] == 6
    assert config["query_pre_attn_scalar"] == scalar
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    # transformers derives the same list when it is given the pattern alone.
    assert config["layer_types"] == Gemma3TextConfig(num_hidden_layers=layers).layer_types


def test_mixture_and_temperature_models_keep_their_own_type(tmp_path: Path) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2}
    mixtral = config_of(write(tmp_path, keys=keys))
    assert (mixtral["model_type"], mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == ("mixtral", 8, 2)
    ministral = config_of(write(tmp_path, "mistral3", {"attention.temperature_scale": 0.1}))
    assert ministral["model_type"] == "ministral3"


def test_mistral_without_a_window_says_so(tmp_path: Path) -> None:
    """An absent key means 4096 to transformers' MistralConfig."""
    assert config_of(write(tmp_path, "mistral3"))["sliding_window"] is None
    assert config_of(write(tmp_path, "mistral3", {"attention.sliding_window": 512}))["sliding_window"] == 512


def test_an_unknown_architecture_is_passed_on(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write(tmp_path, "falcon", {"attention.head_count": [4, 4], "block_count": "two"}))
    assert checkpoint.config["model_type"] == "falcon"
    assert checkpoint.config["hidden_size"] == 64
    assert "num_attention_heads" not in checkpoint.config
    assert "token_embd.weight" in checkpoint.names()
    checkpoint.close()


WRONG = [
    ({"block_count": None}, "lacks the metadata key 'llama.block_count'"),
    ({"attention.layer_norm_rms_epsilon": None}, "lacks the metadata key 'llama.attention.layer_norm_rms_epsilon'"),
    ({"block_count": "two"}, "metadata 'llama.block_count' is 'two' where a whole number"),
    ({"block_count": 4_000_000_000}, "is '4000000000' where a whole number"),
    ({"block_count": 2_000_000}, "claims 2000000 layers and holds 4 tensors"),
    ({"attention.head_count": 0}, "is '0' where a whole number from 1"),
    ({"attention.head_count": [4, 4]}, "where a whole number"),
    ({"attention.head_count": 3}, "lacks the metadata key 'llama.attention.key_length'"),
    ({"attention.key_length": 16, "attention.value_length": 8}, "values of another length"),
    ({"rope.freq_base": float("nan")}, "where a finite number above 0"),
    ({"rope.freq_base": float("inf")}, "where a finite number above 0"),
    ({"rope.scaling.type": 3}, "where a text is needed"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_wrong_metadata_is_one_clear_line(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write(tmp_path, keys=keys)
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("roots", "message"), [({"split.count": 3}, "one of 3 parts"), ({"general.type": "adapter"}, "holds 'adapter'")]
)
def test_parts_and_adapters_are_refused(tmp_path: Path, roots: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(write(tmp_path, roots=roots))
