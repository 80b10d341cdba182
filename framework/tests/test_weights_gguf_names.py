"""GGUF tensors by Hugging Face names, with the converter's row permutation and norm shift undone.

The forward changes are written here from the published converter's definition (llama.cpp convert_hf_to_gguf.py:
`permute` of LlamaModel, `norm + 1` of Gemma3Model), so the reader is checked against their inverse.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.gguf import GGUFCheckpoint

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 8, 32, 64, 40
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SHAPES = {
    "self_attn.q_proj.weight": ("attn_q.weight", (Q, HIDDEN)),
    "self_attn.k_proj.weight": ("attn_k.weight", (KV, HIDDEN)),
    "self_attn.v_proj.weight": ("attn_v.weight", (KV, HIDDEN)),
    "self_attn.o_proj.weight": ("attn_output.weight", (HIDDEN, Q)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", (INNER, HIDDEN)),
    "mlp.up_proj.weight": ("ffn_up.weight", (INNER, HIDDEN)),
    "mlp.down_proj.weight": ("ffn_down.weight", (HIDDEN, INNER)),
    "input_layernorm.weight": ("attn_norm.weight", (HIDDEN,)),
}
BIASES = {
    "self_attn.q_proj.bias": ("attn_q.bias", (Q,)),
    "self_attn.k_proj.bias": ("attn_k.bias", (KV,)),
    "self_attn.v_proj.bias": ("attn_v.bias", (KV,)),
}
POST_NORM = {"post_attention_layernorm.weight": ("ffn_norm.weight", (HIDDEN,))}
HEAD_NORMS = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight", (HEAD_DIM,)),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", (HEAD_DIM,)),
}
GEMMA_NORMS = {
    "post_attention_layernorm.weight": ("post_attention_norm.weight", (HIDDEN,)),
    "pre_feedforward_layernorm.weight": ("ffn_norm.weight", (HIDDEN,)),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.weight", (HIDDEN,)),
}
LAYERS = {
    "llama": SHAPES | POST_NORM | BIASES,
    "mistral3": SHAPES | POST_NORM,
    "qwen2": SHAPES | POST_NORM | BIASES,
    "qwen3": SHAPES | POST_NORM | HEAD_NORMS,
    "gemma3": SHAPES | GEMMA_NORMS | HEAD_NORMS,
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i + j * D/2 of each head moves to row 2i + j, element by element."""
    out = np.empty_like(rows)
    half = len(rows) // num_heads // 2
    for head in range(num_heads):
        for i in range(half):
            for j in range(2):
                out[head * 2 * half + 2 * i + j] = rows[head * 2 * half + j * half + i]
    return out


def converted(architecture: str, gguf_name: str, data: np.ndarray) -> np.ndarray:
    if architecture in ("llama", "mistral3") and "attn_q." in gguf_name:
        return interleave(data, HEADS)
    if architecture in ("llama", "mistral3") and "attn_k." in gguf_name:
        return interleave(data, KV_HEADS)
    return data + 1 if architecture == "gemma3" and gguf_name.endswith("norm.weight") else data


def write_model(path: Path, architecture: str, *, head: bool = False) -> dict[str, np.ndarray]:
    """A two-layer file of random numbers; returns what each Hugging Face name should give."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"embedding_length": HIDDEN, "feed_forward_length": INNER, "block_count": 2}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_context_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(16)
    names = {"model.embed_tokens.weight": ("token_embd.weight", (VOCAB, HIDDEN))}
    names["model.norm.weight"] = ("output_norm.weight", (HIDDEN,))
    names |= {"lm_head.weight": ("output.weight", (VOCAB, HIDDEN))} if head else {}
    for layer in (0, 1):
        for hf_name, (gguf_name, shape) in LAYERS[architecture].items():
            names[f"model.layers.{layer}.{hf_name}"] = (f"blk.{layer}.{gguf_name}", shape)
    expected = {}
    for hf_name, (gguf_name, shape) in names.items():
        # Eighths, so that adding 1 and taking it away again is exact in float32.
        expected[hf_name] = (rng.integers(-64, 64, shape) / 8).astype(np.float32)
        writer.add_tensor(gguf_name, converted(architecture, gguf_name, expected[hf_name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("head", [False, True], ids=["tied", "head"])
@pytest.mark.parametrize("architecture", LAYERS)
def test_every_tensor_is_what_was_converted(tmp_path: Path, architecture: str, head: bool) -> None:
    expected = write_model(tmp_path / "m.gguf", architecture, head=head)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.names() == expected.keys()
    assert checkpoint.config["tie_word_embeddings"] is not head
    for name, data in expected.items():
        assert checkpoint.shape(name) == data.shape
        assert torch.equal(checkpoint.tensor(name, torch.float32), torch.from_numpy(data)), name
    checkpoint.close()


def test_a_quantised_projection_is_unpermuted_by_whole_rows(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).standard_normal((Q, 256), dtype=np.float32)
    quantised = gguf.quants.quantize(interleave(rows, HEADS), gguf.GGMLQuantizationType.Q8_0)
    path = _llama_with(tmp_path, "blk.0.attn_q.weight", quantised, gguf.GGMLQuantizationType.Q8_0)
    alone = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(alone, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = GGUFCheckpoint(path)
    got = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.float32)
    checkpoint.close()
    assert np.array_equal(got.numpy(), expected)


def test_a_projection_larger_than_one_read_block_is_unpermuted(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(-9, 9, (Q * 20, 512)).astype(np.float32)  # 327,680 elements
    path = _llama_with(tmp_path, "blk.0.attn_q.weight", interleave(rows, HEADS), None)
    checkpoint = GGUFCheckpoint(path)
    got = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.bfloat16)
    checkpoint.close()
    assert np.array_equal(got.float().numpy(), rows)


def test_rows_that_do_not_divide_into_heads_are_refused(tmp_path: Path) -> None:
    path = _llama_with(tmp_path, "blk.0.attn_q.weight", np.ones((HEADS * 3, 32), np.float32), None)
    checkpoint = GGUFCheckpoint(path)
    with pytest.raises(CheckpointError, match="12 rows, not a multiple of 2 x 4 heads"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.float32)
    checkpoint.close()


def _llama_with(folder: Path, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType | None) -> Path:
    path = folder / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
