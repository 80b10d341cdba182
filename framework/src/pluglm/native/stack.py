"""All layers of a model in one native call, if their products are, around whatever attention offers its calls."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch

from pluglm.kernel.interfaces.attention import HeadRows
from pluglm.native.layers import NO_LOGITS
from pluglm.native.linear import dense

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.attention import NativeCalls
    from pluglm.kernel.interfaces.model import AttentionCall, LayerSpec
    from pluglm.native.layers import Logits, NativeLayer
    from pluglm.native.tools import NativeTools

# T: rows, D: hidden size, N: query heads, K: kv heads, C: N + 2K heads side by side, H: head dim

# struct Stack of src/stack.cpp: four arrays, the function, two counts, three pointers; what goes in; the head
_STACK = struct.Struct("@5Q2q3Q2Qq3Qf")
_KEPT_ROWS = 64  # of steps that decode, whose room is kept for the next one


@runtime_checkable
class CallsOffered(Protocol):
    """An AttentionCall that may have native calls: for all layers, or None."""

    def native_calls(self, layers: Sequence[LayerSpec], heads: HeadRows) -> NativeCalls | None: ...


def refusal(layers: Sequence[NativeLayer]) -> str | None:
    """Why these layers cannot run in one call, or None."""
    shapes = {(one.spec.num_heads, one.spec.num_kv_heads, one.spec.head_dim, one.dtype) for one in layers}
    return None if len(shapes) == 1 else f"its layers have {len(shapes)} shapes"


class Angles(NamedTuple):
    """The cosine and the sine of each rotary embedding in turn, [T, 1, H]; and for each layer where its own lie."""

    tensors: list[torch.Tensor]
    cosines: array[int]
    sines: array[int]


class Room(NamedTuple):
    """For the heads and the attention of one layer after another, which sees them as `heads`; and for gathered angles.

    One call at a time works in it.
    """

    heads_TCH: torch.Tensor
    out_TNH: torch.Tensor
    heads: HeadRows
    angles: Angles


class Source(NamedTuple):
    """Where the rows come from, as src/stack.cpp has it: the address of x_TD, or of gathers and their number."""

    from_TD: int = 0
    gathers: int = 0
    num_gathers: int = 0


class NativeStack:
    """The FusedStack of layers that `refusal` accepts. Its plain reference is the layers called one by one."""

    def __init__(self, tools: NativeTools, layers: Sequence[NativeLayer], ropes: Sequence[int]) -> None:
        self._tools, self._layers, self._ropes = tools, tuple(layers), tuple(ropes)
        self._specs = [one.spec for one in layers]
        self._first = layers[0]
        self.dtype, self.width, self.head_dim = self._first.dtype, self._first.width, self._first.spec.head_dim
        self.most_rows = min(one.most_rows for one in layers)
        self._addresses = array("Q", [one.address for one in layers])
        self._calls = ctypes.c_char_p * len(layers)
        self._rooms: dict[int, Room] = {}  # by number of rows; one that a call works in is not there

    def __call__(
        self, x_TD: torch.Tensor, angles_T1H: Sequence[torch.Tensor], attend: AttentionCall
    ) -> torch.Tensor | None:
        num_rows = x_TD.shape[0]
        found = self.enter(num_rows, attend)
        if found is None:
            return None
        x_TD = dense(x_TD, self.dtype, (num_rows, self.width))
        angles = self._angles([dense(one, self.dtype, (num_rows, 1, self.head_dim)) for one in angles_T1H])
        out_TD = torch.empty_like(x_TD)
        self.run(*found, angles, out_TD, Source(from_TD=x_TD.data_ptr()), NO_LOGITS)
        return out_TD

    def enter(self, num_rows: int, attend: AttentionCall) -> tuple[Room, NativeCalls] | None:
        """Room for so many rows and the attention's calls in it; None where the layers have to run one by one."""
        if num_rows > self.most_rows or not _offers_calls(attend):
            return None
        room = self._rooms.pop(num_rows, None) or self._make_room(num_rows)
        offered = attend.native_calls(self._specs, room.heads)
        if offered is not None and len(offered.calls) != len(self._layers):
            raise ValueError(f"the attention offers {len(offered.calls)} calls for {len(self._layers)} layers")
        return None if offered is None else (room, offered)

    def run(
        self, room: Room, offered: NativeCalls, angles: Angles, out_TD: torch.Tensor, source: Source, logits: Logits
    ) -> None:
        """Fills out_TD, and logits if there is a head. The room is kept for the next call."""
        num_rows, calls = out_TD.shape[0], self._calls(*offered.calls)
        packed = _STACK.pack(
            *(one.buffer_info()[0] for one in (self._addresses, angles.cosines, angles.sines)),
            ctypes.addressof(calls),
            offered.function,
            len(self._layers),
            num_rows,
            out_TD.data_ptr(),
            room.heads_TCH.data_ptr(),
            room.out_TNH.data_ptr(),
            *source,
            *logits,
        )
        self._tools.library.pluglm_stack(self._tools.handle, self._first.type_code, packed)
        if num_rows <= _KEPT_ROWS:
            self._rooms = {num_rows: room}

    def _make_room(self, num_rows: int) -> Room:
        first, shape = self._first, (num_rows, 1, self.head_dim)
        heads_TCH = torch.empty((num_rows, *first.heads_shape), dtype=self.dtype)
        out_TNH = torch.empty((num_rows, *first.out_shape), dtype=self.dtype)
        angles = self._angles([torch.empty(shape, dtype=self.dtype) for _ in range(2 * (max(self._ropes) + 1))])
        return Room(heads_TCH, out_TNH, HeadRows(*first.split(heads_TCH), out_TNH), angles)

    def _angles(self, tensors: list[torch.Tensor]) -> Angles:
        places = [one.data_ptr() for one in tensors]
        cosines, sines = (array("Q", [places[2 * one + part] for one in self._ropes]) for part in (0, 1))
        return Angles(tensors, cosines, sines)


def _offers_calls(attend: AttentionCall) -> TypeGuard[CallsOffered]:
    """issubclass first: Python keeps its answer."""
    return issubclass(type(attend), CallsOffered) or isinstance(attend, CallsOffered)
