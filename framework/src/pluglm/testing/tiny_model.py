"""A small attention-only model and a loop attention, for the kits of backends and models. Plain, and slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import AttentionCall, LayerSpec, Linear, ModelContext, ModelSpec
from pluglm.testing.batches import slots_at

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary
# N: query heads, K: kv heads, H: head dim, C: keys that a row sees

CONFIG: dict[str, Any] = {
    "model_type": "tiny",
    "hidden_size": 16,
    "vocab_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a TinyModel, by name."""
    width, vocab = config["hidden_size"], config["vocab_size"]
    key = width // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = dict(zip(PARTS, (width, key, key, width), strict=True))
    layers = range(config["num_hidden_layers"])
    shapes = {f"layers.{index}.{part}.weight": (rows[part], width) for index in layers for part in PARTS}
    return {"embedding.weight": (vocab, width), **shapes, "head.weight": (vocab, width)}


class TinyModel:
    """Embedding plus sine positions, attention layers with residuals, a normalised head."""

    interface_version: ClassVar[int] = 1

    def __init__(
        self, spec: ModelSpec, embedding_VD: torch.Tensor, linears: dict[str, Linear], context: ModelContext
    ) -> None:
        self.spec, self._embedding_VD, self._linears, self._context = spec, embedding_VD, linears, context

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        missing = next((key for key in CONFIG if key not in config), None)
        if missing is not None:
            raise CheckpointError(f"config.json: key '{missing}' is missing")
        for key, default in CONFIG.items():
            if isinstance(default, int) and not (isinstance(config[key], int) and config[key] > 0):
                raise CheckpointError(f"config.json: {key} is {config[key]!r}, not a positive number")
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        shape = {"num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"]}
        layers = tuple(
            LayerSpec(index=index, head_dim=head_dim, scale=head_dim**-0.5, **shape)
            for index in range(config["num_hidden_layers"])
        )
        return ModelSpec(
            family="tiny",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            max_position=config["max_position_embeddings"],
            layers=layers,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        spec = cls.read_spec(checkpoint.config)
        shapes = tiny_shapes(checkpoint.config)
        for name, shape in shapes.items():
            if checkpoint.shape(name) != shape:
                raise CheckpointError(f"{checkpoint.path}: tensor '{name}' is missing or not of shape {shape}")
        embedding_VD = checkpoint.tensor("embedding.weight", context.dtype).to(context.device)
        linears = {
            name: context.make_linear(name, checkpoint.tensor(name, context.dtype).to(context.device), None)
            for name in list(shapes)[1:]
        }
        return cls(spec, embedding_VD, linears, context)

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        hidden_TD = self._embedding_VD[inputs.token_ids_T] + self._positions(inputs.positions_T)
        for layer in self.spec.layers:
            project = self._projector(layer.index)
            q_TNH, k_TKH, v_TKH = self._context.map_rows(project, hidden_TD)
            mixed_TD = attend(layer, q_TNH, k_TKH, v_TKH).flatten(1)
            (hidden_TD,) = self._context.map_rows(self._adder(layer.index), hidden_TD, mixed_TD)
        return hidden_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._context.map_rows(self._head, hidden_RD)[0]

    def _positions(self, positions_T: torch.Tensor) -> torch.Tensor:
        width = self.spec.hidden_size
        angles_TD = positions_T[:, None].double() * torch.logspace(0, -2, width, device=positions_T.device).double()
        return torch.sin(angles_TD).to(self._embedding_VD.dtype)

    def _projector(self, index: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def project(hidden_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            head_dim = self.spec.layers[index].head_dim
            parts = (self._linears[f"layers.{index}.{part}.weight"](hidden_TD) for part in PARTS[:3])
            return tuple(part.reshape(len(part), -1, head_dim) for part in parts)

        return project

    def _adder(self, index: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def add(hidden_TD: torch.Tensor, mixed_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (hidden_TD + self._linears[f"layers.{index}.o_proj.weight"](mixed_TD),)

        return add

    def _head(self, hidden_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm_RD = hidden_RD * torch.rsqrt(hidden_RD.float().square().mean(1, keepdim=True) + 1e-6).to(hidden_RD.dtype)
        return (self._linears["head.weight"](norm_RD).float(),)


class LoopAttention:
    """Attention row by row over the stored keys, in float32. plan: the batch itself."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: AttentionBatch,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        slots_T = plan.slots_T.to(keys.device)
        keys[slots_T], values[slots_T] = k_TKH.to(keys.dtype), v_TKH.to(values.dtype)
        out_TNH = torch.empty_like(q_TNH)
        for segment in plan.segments:
            for offset in range(segment.num_query):
                slots = _visible(layer, segment, segment.num_context + offset, plan.block_size)
                row = segment.query_start + offset
                out_TNH[row] = _attend(layer, q_TNH[row], keys[slots], values[slots])
        return out_TNH


def _visible(layer: LayerSpec, segment: Segment, position: int, block_size: int) -> list[int]:
    first = 0 if layer.window is None else max(0, position - layer.window + 1)
    return slots_at(segment.block_table, range(first, position + 1), block_size)


def _attend(layer: LayerSpec, q_NH: torch.Tensor, k_CKH: torch.Tensor, v_CKH: torch.Tensor) -> torch.Tensor:
    group = layer.num_heads // layer.num_kv_heads
    k_CNH, v_CNH = (one.float().repeat_interleave(group, dim=1) for one in (k_CKH, v_CKH))
    scores_CN = (k_CNH * q_NH.float()).sum(-1) * layer.scale
    if layer.soft_cap is not None:
        scores_CN = layer.soft_cap * torch.tanh(scores_CN / layer.soft_cap)
    return (torch.softmax(scores_CN, 0)[:, :, None] * v_CNH).sum(0).to(q_NH.dtype)
