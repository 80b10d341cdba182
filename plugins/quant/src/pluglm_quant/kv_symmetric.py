"""Keys and values as codes with one float32 scale a token and head, made as they come. The plain reference of kernels.

Scales follow the values, so nothing is calibrated, and no value is clipped whatever a text does.
"""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv_format import KVFormat, KVRow, SymmetricCodes

# T: tokens, K: kv heads, H: head dim, which is the number of codes; 1: scales of a row

LEAST_SCALE = 1e-12  # a row of zeros would divide 0 by 0
_MINUS_ZERO = 0x80  # of e4m3; zero is stored in one way, as int8 has it


class SymmetricKV(KVFormat):
    """A subclass says which codes. A row takes head_dim + 4 bytes."""

    interface_version = 1
    Config = ComponentConfig
    codes: SymmetricCodes

    def __init__(self, config: ComponentConfig, device: str, dtype: torch.dtype) -> None:
        self._code_dtype = torch.int8 if self.codes.value_dtype == torch.int8 else torch.uint8

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))

    def row(self, head_dim: int) -> KVRow:
        return KVRow(code_dtype=self._code_dtype, num_codes=head_dim, scale_dtype=torch.float32, num_scales=1)

    def symmetric(self) -> SymmetricCodes:
        return self.codes

    def encode(self, x_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TKH, limit = x_TKH.to(torch.float32), self.codes.limit
        largest_TK1 = x_TKH.abs().amax(-1, keepdim=True)
        # By a tensor: on CUDA torch multiplies with the reciprocal of a number, which rounds twice.
        scale_TK1 = (largest_TK1 / torch.full_like(largest_TK1, limit)).clamp_(min=self.codes.least_scale)
        is_sound_TK1 = scale_TK1.isfinite()
        values_TKH = (x_TKH / scale_TK1).clamp_(-limit, limit).masked_fill_(~is_sound_TK1, 0.0)
        return self._rounded(values_TKH), scale_TK1.masked_fill_(~is_sound_TK1, float("nan"))

    def _rounded(self, values_TKH: torch.Tensor) -> torch.Tensor:
        if self._code_dtype == torch.int8:
            return values_TKH.round_().to(torch.int8)
        codes_TKH = values_TKH.to(self.codes.value_dtype).view(torch.uint8)
        return codes_TKH.masked_fill_(codes_TKH == _MINUS_ZERO, 0)

    def decode(self, codes_TKH: torch.Tensor, scale_TK1: torch.Tensor) -> torch.Tensor:
        return codes_TKH.view(self.codes.value_dtype).to(torch.float32).mul_(scale_TK1)
