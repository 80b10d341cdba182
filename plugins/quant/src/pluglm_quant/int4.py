"""int4 weights in groups along the input, asymmetric. Activations stay in the model's dtype.

w = (q - 8) * scale + zero, q in 0..15, one scale and one (float) zero per output feature and group.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch.nn import functional

from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.footprint import Footprint
from pluglm.kernel.interfaces.model import Linear
from pluglm.kernel.interfaces.quantizer import Quantizer
from pluglm_quant.checks import require_finite, require_matrix
from pluglm_quant.int4_packing import KernelCodes, PlainCodes
from pluglm_quant.tiles import row_tiles, tiled_linear

# R: rows, N: output features, K: input features, n: outputs of one tile
# G: groups, g: inputs of one group, P = G * g: inputs with the padding, 2: scale and zero

_KERNEL_ROWS = 64  # with more rows, dequantising once and multiplying is faster (measured on AVX-512)
_KERNEL_GROUPS = (32, 64, 128, 256)


class Int4Config(ComponentConfig):
    """group_size: inputs that share a scale and a zero; the last group is padded when K is no multiple of it."""

    group_size: int = Field(default=64, ge=2, multiple_of=2)


class Int4Linear(Linear):
    """Codes two a byte, and scale_zero_GN2 in the model's dtype. A row depends on itself and the number of rows only.

    Few bfloat16 rows on a CPU go through torch's int4 kernel; everything else dequantises tile by tile, which is
    the plain reference of the kernel. Only one of the two code layouts is held.
    """

    def __init__(
        self,
        codes: PlainCodes | KernelCodes,
        scale_zero_GN2: torch.Tensor,
        bias_N: torch.Tensor | None,
        num_inputs: int,
        group_size: int,
    ) -> None:
        self.codes, self.scale_zero_GN2, self.bias_N = codes, scale_zero_GN2, bias_N
        self._num_inputs, self._group_size = num_inputs, group_size
        packed = codes.packed if isinstance(codes, KernelCodes) else codes.packed_NJ
        self.num_bytes = packed.nbytes + scale_zero_GN2.nbytes + (0 if bias_N is None else bias_N.nbytes)

    @property
    def num_outputs(self) -> int:
        return self.scale_zero_GN2.shape[1]

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        """x [rows, K] -> [rows, N], in x's dtype."""
        small = 0 < x_RK.shape[0] <= _KERNEL_ROWS and x_RK.dtype == self.scale_zero_GN2.dtype
        if small and isinstance(self.codes, KernelCodes):
            out_RN = self.by_kernel(x_RK, self.codes)
        else:
            out_RN = self.by_tiles(x_RK)
        return out_RN if self.bias_N is None else out_RN.add_(self.bias_N)

    def by_kernel(self, x_RK: torch.Tensor, codes: KernelCodes) -> torch.Tensor:
        """Without bias."""
        out_RN: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_RK.contiguous(), codes.packed, self._group_size, self.scale_zero_GN2
        )
        return out_RN

    def by_tiles(self, x_RK: torch.Tensor) -> torch.Tensor:
        """Without bias; any shape, dtype and device."""
        return tiled_linear(x_RK, self.num_outputs, self.weight)

    def weight(self, start: int, end: int) -> torch.Tensor:
        """weight_nK float32 of output features start .. end; start is a multiple of 64."""
        scale_zero_nG2 = self.scale_zero_GN2[:, start:end].transpose(0, 1).float()
        groups_nGg = self.codes.unpack(start, end).view(end - start, -1, self._group_size)
        groups_nGg.sub_(8).mul_(scale_zero_nG2[..., :1]).add_(scale_zero_nG2[..., 1:])
        return groups_nGg.flatten(1)[:, : self._num_inputs]


class Int4Quantizer(Quantizer):
    """Weights as 4-bit codes in groups along the inputs, made while loading.

    Rounding error of a weight: at most half its group's scale, (max(w, 0) - min(w, 0)) / 15.

    The range of a group always contains zero, so that its zero point is at most 8 scales and survives rounding to
    bfloat16; a group of zeros stays exactly zero.
    """

    interface_version = 1
    Config = Int4Config

    def __init__(self, config: Int4Config, device: str, dtype: torch.dtype) -> None:
        self._group_size, self._device, self._dtype = config.group_size, device, dtype

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Int4Linear:
        """See the contract. Scale and zero are rounded to the model's dtype first, so q fits what is used."""
        require_matrix(name, weight_NK)
        num_outputs, num_inputs = weight_NK.shape
        num_groups = -(-num_inputs // self._group_size)
        codes_NP = torch.empty(num_outputs, num_groups * self._group_size, dtype=torch.uint8, device=self._device)
        scale_zero_GN2 = torch.empty(num_groups, num_outputs, 2, dtype=self._dtype, device=self._device)
        for start, end in row_tiles(num_outputs):
            weight_nK = weight_NK[start:end].to(self._device, torch.float32)
            weight_nP = functional.pad(weight_nK, (0, codes_NP.shape[1] - num_inputs)).contiguous()
            codes_nGg, scale_nG, zero_nG = _quantise(weight_nP.view(end - start, num_groups, -1), self._dtype)
            require_finite(name, scale_nG)
            codes_NP[start:end] = codes_nGg.flatten(1)
            scale_zero_GN2[:, start:end] = torch.stack((scale_nG.T, zero_nG.T), dim=-1)
        bias_N = None if bias_N is None else bias_N.to(self._device, self._dtype)
        return Int4Linear(self._pack(codes_NP, num_inputs), scale_zero_GN2, bias_N, num_inputs, self._group_size)

    def linear_footprint(self, num_outputs: int, num_inputs: int, weight_bytes: int) -> Footprint:
        """extra: the weight, its codes a byte each, and what packing them takes: two float32 copies for the kernel."""
        num_groups = -(-num_inputs // self._group_size)
        num_codes = num_outputs * num_groups * self._group_size
        kept = num_codes // 2 + 2 * num_groups * num_outputs * self._dtype.itemsize
        packing = 8 * num_codes if self._suits_kernel(num_codes == num_outputs * num_inputs) else num_codes // 2
        return Footprint(kept, weight_bytes + num_codes + packing)

    def dequantize(self, linear: Linear) -> torch.Tensor:
        if not isinstance(linear, Int4Linear):
            raise TypeError(f"quantizer 'int4' did not make this layer: {type(linear).__name__}")
        return linear.weight(0, linear.num_outputs)

    def _pack(self, codes_NP: torch.Tensor, num_inputs: int) -> PlainCodes | KernelCodes:
        """The kernel's layout where the kernel is fast (bfloat16 on a CPU) and takes the shape, else the plain one."""
        if self._suits_kernel(codes_NP.shape[1] == num_inputs):
            return KernelCodes.pack(codes_NP) or PlainCodes.pack(codes_NP)
        return PlainCodes.pack(codes_NP)

    def _suits_kernel(self, is_whole: bool) -> bool:
        """is_whole: the inputs fill their groups."""
        on_cpu = torch.device(self._device).type == "cpu"
        return on_cpu and self._dtype == torch.bfloat16 and self._group_size in _KERNEL_GROUPS and is_whole


def _quantise(weight_nGg: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes_nGg uint8, scale_nG, zero_nG), the latter two in dtype."""
    low_nG = weight_nGg.amin(-1).clamp_(max=0)
    high_nG = weight_nGg.amax(-1).clamp_(min=0)
    scale_nG = ((high_nG - low_nG) / 15).clamp_(min=torch.finfo(dtype).tiny).to(dtype)
    zero_nG = (low_nG + 8 * scale_nG.float()).to(dtype)
    offset_nGg = (weight_nGg - zero_nG.float().unsqueeze(-1)) / scale_nG.float().unsqueeze(-1)
    return offset_nGg.round_().add_(8).clamp_(0, 15).to(torch.uint8), scale_nG, zero_nG
