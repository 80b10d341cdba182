"""One pre-norm decoder layer, split where attention comes in. Every function maps rows to rows; none mixes them."""

from __future__ import annotations

import torch

from pluglm.kernel.interfaces.model import LayerParts, RowMap
from pluglm.models.activations import ACTIVATIONS
from pluglm.models.loading import TensorLoader
from pluglm.models.norms import Norm, head_norm, row_norm, wide_weight
from pluglm.models.rope import rotate
from pluglm.models.settings import DecoderSettings

# T: rows, D: hidden size, N: query heads, K: kv heads, C: N + 2K heads side by side, H: head dim


class DecoderLayer:
    """spec: the layer's attention; rope: which of the model's rotary embeddings it uses; fused: the backend's, if any.

    q, k and v are one linear layer, gate and up another: fewer, larger products are faster and quantise alike.
    """

    def __init__(self, settings: DecoderSettings, index: int, loader: TensorLoader) -> None:
        self.spec = settings.spec.layers[index]
        self.rope = settings.rope_of_layer[index]
        self._num_rotated = self.spec.num_heads + self.spec.num_kv_heads
        self._heads_shape = (self._num_rotated + self.spec.num_kv_heads, self.spec.head_dim)
        self._stem = stem = f"model.layers.{index}."
        self._attention_norm = self._row_norm("input_layernorm", settings, loader)
        qkv = [f"{stem}self_attn.{part}_proj" for part in "qkv"]
        self._qkv = loader.linear(f"{stem}self_attn.qkv_proj", qkv)
        self._head_norm = self._make_head_norm(settings, loader) if settings.head_norms else None
        self._output = loader.linear(f"{stem}self_attn.o_proj", [f"{stem}self_attn.o_proj"])
        before_mlp = "pre_feedforward_layernorm" if settings.sandwich_norms else "post_attention_layernorm"
        self._mlp_norm = self._row_norm(before_mlp, settings, loader)
        gate_up = [f"{stem}mlp.gate_proj", f"{stem}mlp.up_proj"]
        self._gate_up = loader.linear(f"{stem}mlp.gate_up_proj", gate_up)
        self._down = loader.linear(f"{stem}mlp.down_proj", [f"{stem}mlp.down_proj"])
        self._activation = ACTIVATIONS[settings.activation]
        self.fused = None if loader.fuser is None else loader.fuser.layer(self._parts(settings, loader))

    def before_attention(
        self, map_rows: RowMap, x_TD: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """pre_attention of all rows, by the backend's fused layer if there is one."""
        if self.fused is not None:
            return self.fused.pre_attention(x_TD, cos_T1H, sin_T1H)
        return map_rows(self.pre_attention, x_TD, cos_T1H, sin_T1H)

    def after_attention(self, map_rows: RowMap, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        """post_attention of all rows, by the backend's fused layer if there is one."""
        if self.fused is not None:
            return self.fused.post_attention(x_TD, out_TNH)
        return map_rows(self.post_attention, x_TD, out_TNH)[0]

    def pre_attention(
        self, x_TD: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH, k_TKH (normalised where the family does, then rotated) and v_TKH; heads may be strided views."""
        spec, rotated = self.spec, self._num_rotated
        heads_TCH = self._qkv(self._attention_norm(x_TD)).view(len(x_TD), *self._heads_shape)
        turned_TCH = heads_TCH[:, :rotated]
        if self._head_norm is not None:
            turned_TCH = self._head_norm(turned_TCH)
        turned_TCH = rotate(turned_TCH, cos_T1H, sin_T1H)
        return turned_TCH[:, : spec.num_heads], turned_TCH[:, spec.num_heads :], heads_TCH[:, rotated:]

    def post_attention(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> tuple[torch.Tensor]:
        """x_TD after the attention's output projection and the feed-forward part."""
        x_TD = x_TD + self._output(out_TNH.flatten(1))
        return (x_TD + self._feed_forward(x_TD),)

    def _feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(self._mlp_norm(x_TD)).chunk(2, -1)
        return self._down(self._activation(gate).mul_(up))

    def _parts(self, settings: DecoderSettings, loader: TensorLoader) -> LayerParts:
        before_mlp = "pre_feedforward_layernorm" if settings.sandwich_norms else "post_attention_layernorm"
        out_norms = {}
        if settings.sandwich_norms:
            out_norms["attention_out_norm"] = self._wide_norm("post_attention_layernorm", settings, loader)
            out_norms["mlp_out_norm"] = self._wide_norm("post_feedforward_layernorm", settings, loader)
        return LayerParts(
            spec=self.spec,
            activation=settings.activation,
            eps=settings.norm_eps,
            attention_norm=self._wide_norm("input_layernorm", settings, loader),
            mlp_norm=self._wide_norm(before_mlp, settings, loader),
            head_norm=self._wide_head_norm(settings, loader) if settings.head_norms else None,
            qkv=self._qkv,
            output=self._output,
            gate_up=self._gate_up,
            down=self._down,
            **out_norms,
        )

    def _wide_norm(self, name: str, settings: DecoderSettings, loader: TensorLoader) -> torch.Tensor:
        return wide_weight(loader.tensor(f"{self._stem}{name}.weight"), settings.norm_offset)

    def _wide_head_norm(self, settings: DecoderSettings, loader: TensorLoader) -> torch.Tensor:
        parts = [("q", self.spec.num_heads), ("k", self.spec.num_kv_heads)]
        weights = [self._wide_norm(f"self_attn.{name}_norm", settings, loader).expand(num, -1) for name, num in parts]
        return torch.cat(weights)

    def _row_norm(self, name: str, settings: DecoderSettings, loader: TensorLoader) -> Norm:
        return row_norm(loader.tensor(f"{self._stem}{name}.weight"), settings.norm_eps, settings.norm_offset)

    def _make_head_norm(self, settings: DecoderSettings, loader: TensorLoader) -> Norm:
        query_H, key_H = (loader.tensor(f"{self._stem}self_attn.{part}_norm.weight") for part in "qk")
        parts = [(query_H, self.spec.num_heads), (key_H, self.spec.num_kv_heads)]
        return head_norm(parts, settings.norm_eps, settings.norm_offset)
