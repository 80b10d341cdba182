"""4-bit codes, two a byte: in plain order, and in the order that torch's CPU kernel wants. Knows no scales.

The kernel's order depends on the CPU's vector width and is not documented: full blocks of B output features store,
for each k, feature j (low nibble) beside feature j + B / 2 (high); the features after the last full block are stored
in neighbouring pairs. B is found by unpacking and comparing, so another order is refused, never misread (CPUs without
AVX2 have one: they keep the plain order and the plain arithmetic).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# N: output features, K: input features, J: bytes in place of 2 codes, n: output features of one tile
# b: blocks of one tile, B: output features of one block

_BLOCKS = (64, 32, 16)


@dataclass(frozen=True, slots=True)
class PlainCodes:
    """packed_NJ uint8 [N, K / 2]: code 2 j in the low nibble of byte j, code 2 j + 1 in the high one."""

    packed_NJ: torch.Tensor

    @classmethod
    def pack(cls, codes_NK: torch.Tensor) -> PlainCodes:
        """codes_NK uint8 0 .. 15, K even."""
        return cls(codes_NK[:, 0::2] | (codes_NK[:, 1::2] << 4))

    def unpack(self, start: int, end: int) -> torch.Tensor:
        """codes_nK float32 of output features start .. end."""
        packed_nJ = self.packed_NJ[start:end]
        return torch.stack((packed_nJ & 15, packed_nJ >> 4), dim=-1).flatten(1).float()


@dataclass(frozen=True, slots=True)
class KernelCodes:
    """packed: uint8 [N, K / 2] as aten::_convert_weight_to_int4pack_for_cpu lays it out; block is B."""

    packed: torch.Tensor
    block: int

    @classmethod
    def pack(cls, codes_NK: torch.Tensor) -> KernelCodes | None:
        """codes_NK uint8 0 .. 15. None when N is no multiple of 16, K is odd or the order is none of those known."""
        num_outputs, num_inputs = codes_NK.shape
        if num_outputs % 16 or num_inputs % 2:
            return None
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK.to(torch.int32), 1)
        for block in _BLOCKS:
            candidate = cls(packed, block)
            if torch.equal(candidate.unpack(0, num_outputs), codes_NK.float()):
                return candidate
        return None

    def unpack(self, start: int, end: int) -> torch.Tensor:
        """codes_nK float32 of output features start .. end; start is a multiple of 64."""
        num_inputs = 2 * self.packed.shape[1]
        full = start + (end - start) // self.block * self.block
        codes_nK = torch.empty(end - start, num_inputs, device=self.packed.device)
        half = self.block // 2
        body_bJK = self.packed[start:full].reshape(-1, num_inputs, half).transpose(1, 2).contiguous()
        blocks_bBK = codes_nK[: full - start].view(-1, self.block, num_inputs)
        blocks_bBK[:, :half] = body_bJK & 15
        blocks_bBK[:, half:] = body_bJK >> 4
        tail_JK = self.packed[full:end].reshape(num_inputs, -1).T
        codes_nK[full - start :: 2] = tail_JK & 15
        codes_nK[full - start + 1 :: 2] = tail_JK >> 4
        return codes_nK
