"""Tiny random checkpoints of several families, and a run on torch with Triton's row kernels between the products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.models.gemma3 import Gemma3Model
from pluglm.models.llama import LlamaModel
from pluglm.models.qwen2 import Qwen2Model
from pluglm.models.qwen3 import Qwen3Model
from pluglm.testing.checkpoints import MemoryCheckpoint
from pluglm.triton_kernels.fuser import TritonFuser
from pluglm.triton_kernels.gather import gather_rows

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 24, 20, 4, 2, 6, 262
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Family:
    """model: the class; config: what a config.json says beside SIZES."""

    model: type[Any]
    config: Mapping[str, Any]

    def checkpoint(self, dtype: torch.dtype = torch.float32) -> RoundedCheckpoint:
        config = {**SIZES, **self.config}
        return RoundedCheckpoint(config, shapes_of(config), dtype)


FAMILIES = {
    "llama": Family(LlamaModel, {"model_type": "llama", "tie_word_embeddings": True}),
    "llama, all biases": Family(
        LlamaModel, {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
    ),
    "qwen2": Family(Qwen2Model, {"model_type": "qwen2", "hidden_act": "relu"}),
    "qwen3": Family(Qwen3Model, {"model_type": "qwen3"}),
    "gemma3": Family(
        Gemma3Model,
        {
            "model_type": "gemma3_text",
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 6,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a checkpoint, by the names that transformers gives it."""
    kind, q, k = config["model_type"], HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    linears = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (k, HIDDEN),
        "self_attn.v_proj": (k, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if kind == "qwen2" else []
    biased = list(linears) if config.get("mlp_bias") else biased
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if kind in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    if kind == "gemma3_text":
        norms |= {"pre_feedforward_layernorm": HIDDEN, "post_feedforward_layernorm": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": linears[name][:1] for name in biased}
    shapes |= {f"{name}.weight": (width,) for name, width in norms.items()}
    layers = range(config["num_hidden_layers"])
    all_layers = {f"model.layers.{index}.{name}": shape for index in layers for name, shape in shapes.items()}
    head = {} if config.get("tie_word_embeddings") else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,), **head, **all_layers}


class RoundedCheckpoint(MemoryCheckpoint):
    """The same values in every dtype: those that `dtype` holds. Weights of norms are around 1, biases are not small."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__(config, shapes)
        self._held = dtype

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        values = super().tensor(name, torch.float32) * (3.0 if name == "model.embed_tokens.weight" else 1.5)
        return (values + 1.0 if "norm" in name else values).to(self._held).to(dtype)


class RowsConfig(ComponentConfig):
    kernels: Literal["triton", "torch"] = "triton"


class RowsBackend(TorchBackend):
    """What the CUDA backend is without its device: torch's products, and with kernels: triton its fuser."""

    interface_version = 1
    Config = RowsConfig

    def __init__(self, config: RowsConfig, context: Any) -> None:
        dtype = getattr(torch, context.dtype)
        super().__init__("cpu", dtype, DenseLinear, whole_rows, 1)
        if config.kernels == "triton":
            self._fuser, self._pick_rows = TritonFuser("cpu", self.kernels), gather_rows

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def free_memory(self) -> int:
        return 1 << 26
