"""A decoder layer around its attention, and a head: products as they are given, what stands between them in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pluglm.triton_kernels.gated import GATED_ACTIVATIONS, gated
from pluglm.triton_kernels.launching import MOST_FEATURES
from pluglm.triton_kernels.rms_norm import add_rms_norm, add_rows, rms_norm
from pluglm.triton_kernels.rope import MOST_HEAD_DIM, rope

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.model import LayerParts

# T: rows, D: hidden size, I: inner size, N: query heads, K: kv heads, C: N + 2K heads side by side, H: head dim
# R: rows with logits, V: vocabulary

_ROW_NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")


def layer_refusal(parts: LayerParts) -> str | None:
    """Why a layer of these parts cannot be fused, or None. Its products may be of any kind."""
    spec = parts.spec
    if parts.activation not in GATED_ACTIVATIONS:
        return f"activation {parts.activation} has no kernel"
    if spec.head_dim % 2:
        return "its head dim is odd"
    if spec.head_dim > MOST_HEAD_DIM:
        return f"its head dim is {spec.head_dim}, and a program holds {MOST_HEAD_DIM}"
    if reason := width_refusal(parts.attention_norm):
        return reason
    heads = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
    shapes = {**dict.fromkeys(_ROW_NORMS, tuple(parts.attention_norm.shape)), "head_norm": heads}
    for name, shape in shapes.items():
        weight = getattr(parts, name)
        if weight is not None and tuple(weight.shape) != shape:
            return f"its {name} is {list(weight.shape)}, not {list(shape)}"
    return None


def width_refusal(norm_D: torch.Tensor) -> str | None:
    """Why rows cannot be normalised with this weight, or None."""
    if norm_D.dim() != 1:
        return f"its norm is {list(norm_D.shape)}, not a row"
    too_wide = len(norm_D) > MOST_FEATURES
    return f"its rows have {len(norm_D)} features, and a program holds {MOST_FEATURES}" if too_wide else None


class TritonLayer:
    """The FusedLayer of parts that `layer_refusal` accepts: five launches beside the four products.

    Rounds to the run's dtype before each product and after each addition, and computes in float32 between. Its plain
    reference is DecoderLayer on torch. Waits for no device and allocates by the number of rows only, so that it can be
    captured.
    """

    def __init__(self, parts: LayerParts) -> None:
        spec = parts.spec
        self._eps, self._activation = parts.eps, parts.activation
        self._qkv, self._output, self._gate_up, self._down = parts.qkv, parts.output, parts.gate_up, parts.down
        self._attention_norm_D, self._mlp_norm_D = _wide(parts.attention_norm), _wide(parts.mlp_norm)
        self._attention_out_norm_D = _wide_if_any(parts.attention_out_norm)
        self._mlp_out_norm_D = _wide_if_any(parts.mlp_out_norm)
        self._head_norm_CH = _wide_if_any(parts.head_norm)
        self._num_heads, self._num_rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
        self._heads_shape = (self._num_rotated + spec.num_kv_heads, spec.head_dim)

    def pre_attention(
        self, x_TD: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH and k_TKH, views of one new tensor, and v_TKH, a view of the product."""
        product = self._qkv(rms_norm(x_TD, self._attention_norm_D, self._eps))
        heads_TCH = product.view(x_TD.shape[0], *self._heads_shape)
        turned_TCH = rope(heads_TCH[:, : self._num_rotated], cos_T1H, sin_T1H, self._head_norm_CH, self._eps)
        return turned_TCH[:, : self._num_heads], turned_TCH[:, self._num_heads :], heads_TCH[:, self._num_rotated :]

    def post_attention(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        """x_TD after the attention's output projection and the feed-forward part."""
        change_TD = self._output(out_TNH.flatten(1))
        normed_TD, x_TD = add_rms_norm(
            change_TD, x_TD, self._mlp_norm_D, self._eps, x_weight_D=self._attention_out_norm_D
        )
        active_TI = gated(self._gate_up(normed_TD), self._activation)
        return add_rows(self._down(active_TI), x_TD, self._eps, x_weight_D=self._mlp_out_norm_D)


class TritonHead:
    """Final norm and head: hidden_RD -> logits_RV float32, before a soft cap."""

    def __init__(self, norm_D: torch.Tensor, eps: float, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._norm_D, self._eps, self._product = _wide(norm_D), eps, product

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._product(rms_norm(hidden_RD, self._norm_D, self._eps)).float()


def _wide(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().contiguous()


def _wide_if_any(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else _wide(weight)
