"""A linear layer on native products, for the row counts where they are the fastest, and on torch's for the others."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pluglm.native.library import LinearStruct
from pluglm.native.tools import DTYPES

if TYPE_CHECKING:
    from pluglm.native.tools import NativeTools

# R: rows, N: output features, K: input features

# Above so many rows torch's matrix product is the faster one where weights do not fit panels (src/panels.h). Measured
# for avx512_bf16 on one machine; the others are estimates from the rates that both products had there at that level,
# and amx in bfloat16 is a guess: torch has tiles there, and the native product of such weights has none.
_MOST_ROWS = {
    ("amx", torch.bfloat16): 16,
    ("avx512_bf16", torch.bfloat16): 64,
    ("amx", torch.float32): 32,
    ("avx512_bf16", torch.float32): 128,
    ("avx512", torch.float32): 32,
    ("avx2", torch.float32): 16,
}
_MOST_ROWS_ELSEWHERE = 8
ANY_ROWS = 1 << 40
_PAIRS = ("amx", "avx512_bf16")  # levels that multiply pairs of bfloat16


def most_native_rows(tools: NativeTools, dtype: torch.dtype) -> int:
    """The largest number of rows that the native product is meant for, unless bits must not depend on it."""
    return _MOST_ROWS.get((tools.level, dtype), _MOST_ROWS_ELSEWHERE)


def dense(x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """x contiguous, for a kernel, which sees addresses only. ValueError unless it is of that dtype and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_cpu:
        raise ValueError(
            f"a native kernel takes {list(shape)} of {dtype} on the CPU, not {list(x.shape)} of {x.dtype} on {x.device}"
        )
    return x.contiguous()


class NativeLinear:
    """x @ weight.T + bias. In float32, and where it is packed, a row that native runs has bits of its own, whatever the
    others are.

    weight_NK: float32 or bfloat16; it is copied into huge pages, unless it is there, and packed for products in panels
    (src/panels.h) where it fits. shared: others read it too, so it is not packed. bias_N becomes float32.
    always_native: for runs in which bits must not depend on the number of rows. why_torch: why torch multiplies many
    rows, or None; most_rows: how many stay native. torch's product is its plain reference (DenseLinear).
    """

    def __init__(
        self,
        tools: NativeTools,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        *,
        always_native: bool = False,
        shared: bool = False,
    ) -> None:
        if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
            raise ValueError(f"a weight {list(weight_NK.shape)} takes no bias {list(bias_N.shape)}")
        self._tools, self._type = tools, DTYPES[weight_NK.dtype]
        self.memory = tools.placed(weight_NK)  # [N, K], or those values packed
        self.shape, self.dtype, self.bias_N = self.memory.shape, self.memory.dtype, bias_N
        self._wide_bias_N = None if bias_N is None else bias_N.float().contiguous()
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        bias = 0 if self._wide_bias_N is None else self._wide_bias_N.data_ptr()
        self.struct = LinearStruct(self.memory.data_ptr(), bias, *self.shape)
        self.address = ctypes.addressof(self.struct)
        if self.dtype == torch.bfloat16 and not shared and tools.library.pluglm_panels_fit(self.address):
            tools.library.pluglm_pack_weight(tools.handle, self.memory.data_ptr(), *self.shape)
            self.struct.is_packed = 1
        self.why_torch = None if always_native else self._why_torch(shared)
        self.most_rows = ANY_ROWS if self.why_torch is None else most_native_rows(tools, weight_NK.dtype)

    @property
    def is_packed(self) -> bool:
        return bool(self.struct.is_packed)

    @property
    def weight(self) -> torch.Tensor:
        """The values [N, K] as they were given; a copy where they are packed."""
        if not self.is_packed:
            return self.memory
        num_outputs, num_inputs = self.shape
        return self.memory.view(num_outputs // 16, num_inputs // 2, 16, 2).transpose(1, 2).reshape(self.shape)

    def rows(self, numbers_T: torch.Tensor) -> torch.Tensor:
        """Weight rows by their numbers [T], int64, as they were given: [T, K]. IndexError for one that is not there."""
        if not self.is_packed:
            return functional.embedding(numbers_T, self.memory)
        numbers_T = dense(numbers_T, torch.int64, (numbers_T.shape[0],))
        out_TK = torch.empty((numbers_T.shape[0], self.shape[1]), dtype=self.dtype)
        tools, given = self._tools, (numbers_T.data_ptr(), numbers_T.shape[0], out_TK.data_ptr())
        tools.library.pluglm_packed_rows(tools.handle, self.address, *given)
        return out_TK

    def _why_torch(self, shared: bool) -> str | None:
        """Why torch multiplies many rows, or None."""
        tools, dtype = self._tools, self.dtype
        if self.is_packed:
            return None
        if dtype == torch.bfloat16 and tools.level in _PAIRS:
            return "others read it as it lies" if shared else f"{list(self.shape)} is not in multiples of 32"
        return f"{str(dtype).removeprefix('torch.')} of more than {most_native_rows(tools, dtype)} rows is faster there"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] -> [rows, N], in x's dtype."""
        if x.shape[0] > self.most_rows:
            return functional.linear(x, self.memory, self.bias_N)
        return self.native(x, x.dtype)

    def native(self, x_RK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """The native product whatever the number of rows, in out_dtype: x's, or float32."""
        num_outputs, num_inputs = self.shape
        x_RK = dense(x_RK, self.dtype, (x_RK.shape[0], num_inputs))
        out_RN = torch.empty((x_RK.shape[0], num_outputs), dtype=out_dtype)
        tools = self._tools
        tools.library.pluglm_linear(
            tools.handle, self._type, self.address, x_RK.data_ptr(), x_RK.shape[0], DTYPES[out_dtype], out_RN.data_ptr()
        )
        return out_RN
