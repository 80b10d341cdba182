"""Hugging Face names of the tensors in a GGUF file, and which of them the converter rearranged. No file access."""

from __future__ import annotations

from collections.abc import Collection

from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import get_tensor_name_map

MODEL_TYPES = {"llama": "llama", "mistral3": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_PERMUTED = frozenset({"llama", "mistral3"})
_SHIFTED = frozenset({"gemma3"})
_WHOLE = ("model.embed_tokens", "model.norm", "lm_head")
_PER_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def hugging_face_names(architecture: str, num_layers: int, present: Collection[str]) -> dict[str, str]:
    """HF name -> name in the file, for each tensor that is `present`; others keep their own name.

    Of an architecture outside `MODEL_TYPES` every tensor keeps its own name.
    """
    unnamed = set(present)
    names: dict[str, str] = {}
    if architecture in MODEL_TYPES:
        for hf_name, gguf_name in _candidates(architecture, num_layers):
            if gguf_name in unnamed:
                unnamed.discard(gguf_name)
                names[hf_name] = gguf_name
    names.update({name: name for name in unnamed if name not in names})
    return names


def _candidates(architecture: str, num_layers: int) -> list[tuple[str, str]]:
    table = get_tensor_name_map(MODEL_ARCH[architecture.upper()], num_layers)
    stems = [*_WHOLE, *(f"model.layers.{layer}.{stem}" for layer in range(num_layers) for stem in _PER_LAYER)]
    pairs = []
    for stem in stems:
        gguf_stem = table.get_name(stem)
        if gguf_stem is not None:
            pairs += [(f"{stem}.{part}", f"{gguf_stem}.{part}") for part in ("weight", "bias")]
    return pairs


def permuted_heads(architecture: str, gguf_name: str, num_heads: int, num_kv_heads: int) -> int | None:
    """Heads whose rows the converter interleaved for ggml's rotary layout, or None for a tensor left as it was."""
    if architecture not in _PERMUTED:
        return None
    part = gguf_name.split(".")[-2] if "." in gguf_name else ""
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part)


def added_constant(architecture: str, gguf_name: str) -> float:
    """What the converter added to every element: gemma norms are stored as 1 + weight, as they are applied."""
    return 1.0 if architecture in _SHIFTED and gguf_name.endswith("norm.weight") else 0.0
