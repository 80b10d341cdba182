"""All layers of a model in one native call, if their products are, around whatever attention offers its calls."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from pluglm.kernel.interfaces.attention import HeadRows
from pluglm.native.linear import dense

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.attention import NativeCalls
    from pluglm.kernel.interfaces.model import AttentionCall, LayerSpec
    from pluglm.native.layers import NativeLayer
    from pluglm.native.tools import NativeTools

# T: rows, D: hidden size, N: query heads, K: kv heads, C: N + 2K heads side by side, H: head dim

# struct Stack of src/stack.cpp: four arrays, the function, two counts, three pointers
_STACK = struct.Struct("@5Q2q3Q")


@runtime_checkable
class CallsOffered(Protocol):
    """An AttentionCall that may have native calls: for all layers, or None."""

    def native_calls(self, layers: Sequence[LayerSpec], heads: HeadRows) -> NativeCalls | None: ...


def refusal(layers: Sequence[NativeLayer]) -> str | None:
    """Why these layers cannot run in one call, or None."""
    shapes = {(one.spec.num_heads, one.spec.num_kv_heads, one.spec.head_dim, one.dtype) for one in layers}
    return None if len(shapes) == 1 else f"its layers have {len(shapes)} shapes"


class NativeStack:
    """The FusedStack of layers that `refusal` accepts. Its plain reference is the layers called one by one."""

    def __init__(self, tools: NativeTools, layers: Sequence[NativeLayer], ropes: Sequence[int]) -> None:
        self._tools, self._layers, self._ropes = tools, tuple(layers), tuple(ropes)
        self._specs = [one.spec for one in layers]
        self._most_rows = min(one.most_rows for one in layers)
        self._addresses = array("Q", [one.address for one in layers])

    def __call__(
        self, x_TD: torch.Tensor, angles_T1H: Sequence[torch.Tensor], attend: AttentionCall
    ) -> torch.Tensor | None:
        num_rows, first = x_TD.shape[0], self._layers[0]
        if num_rows > self._most_rows or not isinstance(attend, CallsOffered):
            return None
        heads_TCH = torch.empty((num_rows, *first.heads_shape), dtype=first.dtype)
        out_TNH = torch.empty((num_rows, *first.out_shape), dtype=first.dtype)
        offered = attend.native_calls(self._specs, HeadRows(*first.split(heads_TCH), out_TNH))
        if offered is None:
            return None
        x_TD = dense(x_TD, first.dtype, (num_rows, first.width)).clone()
        angles = [dense(one, first.dtype, (num_rows, 1, first.spec.head_dim)) for one in angles_T1H]
        self._run(offered, angles, x_TD, heads_TCH, out_TNH)
        return x_TD

    def _run(self, offered: NativeCalls, angles: list[torch.Tensor], *rows: torch.Tensor) -> None:
        """rows: x_TD, which changes in place, heads_TCH and out_TNH."""
        if len(offered.calls) != len(self._layers):
            raise ValueError(f"the attention offers {len(offered.calls)} calls for {len(self._layers)} layers")
        cosines, sines = (array("Q", [angles[2 * one + part].data_ptr() for one in self._ropes]) for part in (0, 1))
        calls = (ctypes.c_char_p * len(offered.calls))(*offered.calls)
        packed = _STACK.pack(
            *(one.buffer_info()[0] for one in (self._addresses, cosines, sines)),
            ctypes.addressof(calls),
            offered.function,
            len(self._layers),
            rows[0].shape[0],
            *(one.data_ptr() for one in rows),
        )
        self._tools.library.pluglm_stack(self._tools.handle, self._layers[0].type_code, packed)
