"""Translates GGUF metadata into the keys of a Hugging Face config.json. Reads no tensor data.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluglm.weights.gguf_header import TensorInfo
from pluglm.weights.gguf_keys import Keys
from pluglm.weights.gguf_names import MODEL_TYPES
from pluglm.weights.gguf_rope import rope_scaling
from pluglm.weights.messages import damaged, refusal

_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62
_MAY_BE_NONE = ("rope_scaling", "sliding_window")  # where a missing key would mean something else


def translate_config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config. Raises CheckpointError when a known architecture lacks a key or has one of the wrong type or range.

    An unknown architecture keeps its name as `model_type`, with the keys that could be read: it is the registry of
    model families that says which ones there are.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise refusal(path, "does not say its general.architecture; convert it again")
    keys = Keys(path, metadata, architecture, lenient=architecture not in MODEL_TYPES)
    model_type = _model_type(keys)
    config = {"model_type": model_type, "vocab_size": _vocab_size(keys, tensors)} | _sizes(keys, tensors)
    config |= _rotary(keys) | _token_ids(keys) | _switches(model_type, tensors)
    if model_type == "gemma3_text":
        config |= _gemma3(keys, config)
    elif model_type == "mistral" or keys.integer("attention.sliding_window") is not None:
        config["sliding_window"] = keys.integer("attention.sliding_window")  # None here, since absent means 4096
    return {key: value for key, value in config.items() if value is not None or key in _MAY_BE_NONE}


def _model_type(keys: Keys) -> str:
    if keys.architecture == "llama" and keys.integer("expert_count", least=0):
        return "mixtral"
    if keys.architecture == "mistral3" and keys.number("attention.temperature_scale") is not None:
        return "ministral3"
    return MODEL_TYPES.get(keys.architecture, keys.architecture)


def _sizes(keys: Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
    }
    read = keys.integer if keys.lenient else keys.required
    config: dict[str, Any] = {name: read(key) for name, key in names.items()}
    if not keys.lenient and config["num_hidden_layers"] > len(tensors):
        raise damaged(keys.path, f"claims {config['num_hidden_layers']} layers and holds {len(tensors)} tensors")
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.integer("attention.head_count_kv") or heads
    config["head_dim"] = _head_dim(keys, config["hidden_size"], heads)
    config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    config["num_local_experts"] = keys.integer("expert_count")
    config["num_experts_per_tok"] = keys.integer("expert_used_count")
    if config["rms_norm_eps"] is None and not keys.lenient:
        raise keys.missing("attention.layer_norm_rms_epsilon")
    return config


def _head_dim(keys: Keys, hidden_size: int | None, heads: int | None) -> int | None:
    head_dim = keys.integer("attention.key_length")
    if head_dim is None and hidden_size and heads:
        head_dim = hidden_size // heads if hidden_size % heads == 0 else None
    if keys.lenient:
        return head_dim
    if head_dim is None:
        raise keys.missing("attention.key_length")
    if keys.integer("attention.value_length") not in (None, head_dim):
        raise refusal(keys.path, "has attention values of another length than its keys, which no known model has")
    return head_dim


def _vocab_size(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int | None:
    embedding = tensors.get("token_embd.weight")
    return keys.integer("vocab_size") if embedding is None else embedding.shape[0]


def _rotary(keys: Keys) -> dict[str, Any]:
    config: dict[str, Any] = {
        "rope_theta": keys.number("rope.freq_base") or 10000.0,
        "rope_scaling": rope_scaling(keys),
    }
    rotated, head_dim = keys.integer("rope.dimension_count"), keys.integer("attention.key_length")
    if head_dim is None:
        hidden_size, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        head_dim = hidden_size // heads if hidden_size and heads else None
    if rotated and head_dim and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return config


def _token_ids(keys: Keys) -> dict[str, Any]:
    """eos_token_id: one id, or a list when the file marks more tokens that end a turn (eot) or a message (eom)."""
    ends: list[int] = []
    for name in ("eos", "eot", "eom"):
        token_id = keys.root_integer(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id not in ends:
            ends.append(token_id)
    return {
        "bos_token_id": keys.root_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": keys.root_integer("tokenizer.ggml.padding_token_id"),
    }


def _switches(model_type: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    activation = {"hidden_activation": "gelu_pytorch_tanh"} if model_type == "gemma3_text" else {"hidden_act": "silu"}
    return {
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        **(activation if model_type in (*MODEL_TYPES.values(), "mixtral") else {}),
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What every Gemma 3 shares and GGUF leaves out; the 27B alone scales queries by hidden_size / heads."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    window = keys.integer("attention.sliding_window")
    if window is None:
        raise keys.missing("attention.sliding_window")
    pattern = keys.integer("attention.sliding_window_pattern") or _GEMMA3_PATTERN
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "rope_theta": keys.number("rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": keys.number("rope.freq_base_swa") or 10000.0,
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
        "query_pre_attn_scalar": per_head if num_layers == _GEMMA3_27B_LAYERS else head_dim,
    }
