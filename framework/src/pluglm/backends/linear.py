"""Plain linear layers: the dense one, and one whose weight oneDNN has packed for this CPU. Knows no quantisation."""

from __future__ import annotations

import torch
from torch.nn import functional

# N: output features, K: input features


class DenseLinear:
    """x @ weight.T + bias, with the weight as it came. The reference of PackedLinear, and the layer on any device."""

    def __init__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.name = name
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight_NK = weight_NK
        self._bias_N = bias_N

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight_NK, self._bias_N)


class PackedLinear:
    """The same product with the weight reordered once into oneDNN's blocked layout; the plain weight is let go.

    About twice the speed of DenseLinear in bfloat16 at few rows, and in float32 at many (docs.pytorch.org calls the
    mechanism weight prepacking).
    """

    def __init__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.name = name
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
        self._bias_N = bias_N

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias_N, "none", [], "")
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU packs weights of this dtype and multiplies them without emulation."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
