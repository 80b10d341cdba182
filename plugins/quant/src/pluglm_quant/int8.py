"""int8 weights, symmetric, one scale per output channel. Activations stay in the model's dtype.

w = q * scale, q in -127..127, scale = max |w| / 127 of the channel (round to nearest, as in "LLM.int8()", 2022).
"""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.footprint import Footprint
from pluglm.kernel.interfaces.model import Linear
from pluglm.kernel.interfaces.quantizer import Quantizer
from pluglm_quant.checks import require_finite, require_matrix
from pluglm_quant.tiles import TILE_N, row_tiles, tiled_linear

# R: rows, N: output features, K: input features, n: output features of one tile

_KERNEL_ROWS = 24  # with more rows, dequantising once and multiplying is faster (measured on AVX-512)
_KERNEL_K = 32  # torch's bfloat16 kernel reads past the row, or crashes, unless K is a multiple of its vector


class Int8Linear(Linear):
    """q_NK int8 and scale_N in the model's dtype. The result of a row depends on that row and the number of rows.

    Few bfloat16 rows on a CPU go through torch's int8 kernel; everything else dequantises tile by tile, which is
    the plain reference of the kernel.
    """

    def __init__(self, q_NK: torch.Tensor, scale_N: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.q_NK, self.scale_N, self.bias_N = q_NK, scale_N, bias_N
        self.num_bytes = q_NK.nbytes + scale_N.nbytes + (0 if bias_N is None else bias_N.nbytes)
        on_cpu = q_NK.device.type == "cpu" and scale_N.dtype == torch.bfloat16
        self.has_kernel = on_cpu and q_NK.shape[1] % _KERNEL_K == 0

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        """x [rows, K] -> [rows, N], in x's dtype."""
        small = 0 < x_RK.shape[0] <= _KERNEL_ROWS and x_RK.dtype == self.scale_N.dtype
        out_RN = self.by_kernel(x_RK) if small and self.has_kernel else self.by_tiles(x_RK)
        return out_RN if self.bias_N is None else out_RN.add_(self.bias_N)

    def by_kernel(self, x_RK: torch.Tensor) -> torch.Tensor:
        """Without bias; only where has_kernel."""
        out_RN: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x_RK.contiguous(), self.q_NK, self.scale_N)
        return out_RN

    def by_tiles(self, x_RK: torch.Tensor) -> torch.Tensor:
        """Without bias; any shape, dtype and device."""
        return tiled_linear(x_RK, self.q_NK.shape[0], self.weight)

    def weight(self, start: int, end: int) -> torch.Tensor:
        """weight_nK float32 of output features start .. end."""
        return self.q_NK[start:end].float().mul_(self.scale_N[start:end, None].float())


class Int8Quantizer(Quantizer):
    """Weights as 8-bit codes with one scale per output channel, made while loading.

    Rounding error of a weight: at most half its channel's scale. A channel of zeros stays exactly zero.
    """

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Int8Linear:
        """See the contract. The scale is rounded to the model's dtype first, so q fits the scale that is used."""
        require_matrix(name, weight_NK)
        q_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=self._device)
        scale_N = torch.empty(weight_NK.shape[0], dtype=self._dtype, device=self._device)
        for start, end in row_tiles(weight_NK.shape[0]):
            weight_nK = weight_NK[start:end].to(self._device, torch.float32)
            scale_n = (weight_nK.abs().amax(1) / 127).clamp_(min=torch.finfo(self._dtype).tiny).to(self._dtype)
            require_finite(name, scale_n)
            q_NK[start:end] = (weight_nK / scale_n[:, None].float()).round_().clamp_(-127, 127).to(torch.int8)
            scale_N[start:end] = scale_n
        return Int8Linear(q_NK, scale_N, None if bias_N is None else bias_N.to(self._device, self._dtype))

    def linear_footprint(self, num_outputs: int, num_inputs: int, weight_bytes: int) -> Footprint:
        """extra: the weight, and of one tile its float32 values, their sizes and their quotients."""
        tile_bytes = 4 * min(num_outputs, TILE_N) * num_inputs
        return Footprint(num_outputs * (num_inputs + self._dtype.itemsize), weight_bytes + 3 * tile_bytes)

    def dequantize(self, linear: Linear) -> torch.Tensor:
        if not isinstance(linear, Int8Linear):
            raise TypeError(f"quantizer 'int8' did not make this layer: {type(linear).__name__}")
        return linear.weight(0, linear.q_NK.shape[0])
