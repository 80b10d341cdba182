"""Attention over stored keys and values in one native call a layer, which can store the new ones first.

Its plain torch reference is the `naive` attention plugin.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pluglm.native.tools import DTYPES

if TYPE_CHECKING:
    from pluglm.kernel.core import Segment
    from pluglm.kernel.interfaces.model import LayerSpec
    from pluglm.native.tools import NativeTools

# T: tokens of the flat batch, N: query heads, K: kv heads (N is a multiple of K), H: head dim, S: slots of the store

_MOST_HEAD_DIM = 1024  # beyond it a span of keys fits no cache, and the scratch memory of a thread reaches 10 MB

# struct Attention of src/attention.h, in pieces by what they change with: the rows of the queries and of the result;
# keys and values of the layer; new keys, segments, counts and strides of the step; strides and numbers of the layer.
# What is of the layer is packed once, what is of the step once for all layers.
_ROWS, _PLACE, _STEP, _NUMBERS = (struct.Struct(one) for one in ("@2Q", "@2Q", "@5Q5q", "@4q5i2f"))

_OUT_OF_RANGE = "a segment's rows and tokens, and its blocks, are numbers of 31 bits from 0"
_FEW = 64  # numbers of which Python finds the largest before torch has begun to look


class SegmentTable(NamedTuple):
    """The segments of a step as the kernels read them, int32: four numbers of each, and all block tables in a row.

    num_rows: what the segments reach of the batch; num_slots: what their blocks reach of the store.
    """

    segments: array[int]
    block_tables: array[int]
    block_size: int
    addresses: tuple[int, int]
    num_rows: int
    num_slots: int

    @property
    def num_segments(self) -> int:
        return len(self.segments) // 4


class _Blocks(NamedTuple):
    """A block table, its int32 numbers, and one more than the largest of them."""

    table: Sequence[int]
    packed: bytes
    reached: int


class NewKeys(NamedTuple):
    """Rows to store: k_TKH and v_TKH, whose tokens may be any distance apart, at slots_T (int64)."""

    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    slots_T: torch.Tensor


class StoredLayer(NamedTuple):
    """A layer's pieces of a call, which stay what they are as long as its keys and values lie where they do."""

    place: bytes
    numbers: bytes


def slots_reached(slots_T: torch.Tensor) -> int:
    """How many slots a store must have to take rows at slots_T. ValueError unless they are int64, dense and from 0."""
    if slots_T.dtype != torch.int64:
        raise ValueError(f"the native attention takes slots as dense int64, not {slots_T.dtype}")
    if not slots_T.is_contiguous():
        raise ValueError(f"the native attention takes slots as dense int64, not of stride {slots_T.stride()}")
    return _reached(slots_T.tolist() if slots_T.shape[0] <= _FEW else slots_T)


def _reached(places: Sequence[int] | torch.Tensor) -> int:
    """One more than the largest of slots or blocks. ValueError for one that is negative."""
    if isinstance(places, torch.Tensor):
        low, high = (int(one) for one in places.aminmax())
    else:
        low, high = min(places, default=0), max(places, default=-1)
    if low < 0:
        raise ValueError(f"{low} is no slot and no block of the store of keys and values")
    return high + 1


def _pack_blocks(table: Sequence[int]) -> _Blocks:
    """ValueError for a number that is no block."""
    packed = _numbers("i", table)
    reached = _reached(table if len(table) <= _FEW else torch.frombuffer(packed, dtype=torch.int32))
    return _Blocks(table, packed.tobytes(), reached)


def _numbers(kind: str, numbers: Sequence[int]) -> array[int]:
    try:
        return array(kind, numbers)
    except OverflowError:
        raise ValueError(_OUT_OF_RANGE) from None


class NativeAttention:
    """Causal attention in float32 or bfloat16, the softmax and all sums in float32.

    In float32 a row's bits depend on nothing but the keys and values that it sees: not on its batch, chunk, block size
    or threads, nor on multiples of 64 tokens that no row sees being dropped. In bfloat16 the softmax's weights are
    rounded to bfloat16 where the CPU multiplies that. Method: FlashAttention-2 (arXiv:2307.08691) in spans of 512 keys.
    """

    def __init__(self, tools: NativeTools) -> None:
        self._tools = tools
        self._attend = tools.library.pluglm_attention
        self._blocks: dict[int, _Blocks] = {}  # of the last plan, by the table's identity; most of them come again
        self.function: int = ctypes.cast(self._attend, ctypes.c_void_p).value or 0  # its address, as NativeCalls has it

    def can_run(self, dtype: torch.dtype, head_dim: int) -> str | None:
        """None, or why not. dtype: of the queries and of the store."""
        if dtype not in DTYPES:
            return f"the dtype is {dtype}"
        return f"the head dim is {head_dim}" if head_dim > _MOST_HEAD_DIM else None

    def plan(self, segments: Sequence[Segment], block_size: int) -> SegmentTable:
        """What all layers of a step with these block tables share.

        ValueError for a table that is shorter than its keys, and for negative numbers: the kernels check nothing.
        """
        numbers: list[int] = []
        packed: list[bytes] = []
        known, seen = self._blocks, dict[int, _Blocks]()
        num_rows = num_blocks = num_reached = 0
        for one in segments:
            start, num_query, num_context, table = one.query_start, one.num_query, one.num_context, one.block_table
            if len(table) * block_size < num_context + num_query:
                raise ValueError(f"{len(table)} blocks of {block_size} hold no {num_context + num_query} keys")
            blocks = known.get(id(table)) or _pack_blocks(table)
            if isinstance(table, tuple):  # what may change is not known by its identity
                seen[id(table)] = blocks
            numbers += (start, num_query, num_context, num_blocks)
            packed.append(blocks.packed)
            num_blocks += len(table)
            if blocks.reached > num_reached:
                num_reached = blocks.reached
            if start + num_query > num_rows:
                num_rows = start + num_query
        self._blocks, tables = seen, array("i", b"".join(packed))
        rows = _numbers("I", numbers)  # unsigned, since that refuses negative ones
        if max(numbers, default=0) >= 2**31:  # the kernels read them as signed
            raise ValueError(_OUT_OF_RANGE)
        addresses = rows.buffer_info()[0], tables.buffer_info()[0]
        return SegmentTable(rows, tables, block_size, addresses, num_rows, num_reached * block_size)

    def attend(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        table: SegmentTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        new: NewKeys | None = None,
    ) -> torch.Tensor:
        """out_TNH in q's dtype, after storing `new`. Rows of no segment are undefined.

        keys and values [S, K, H] have q's dtype, q's tokens may be any distance apart.
        """
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        call = self.pack(layer, q_TNH, out_TNH, table, keys, values, new)
        self._attend(self._tools.handle, DTYPES[q_TNH.dtype], call)
        return out_TNH

    def pack(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        out_TNH: torch.Tensor,
        table: SegmentTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        new: NewKeys | None,
    ) -> bytes:
        """`attend` with these tensors as the C function takes it. Good while they and the table live."""
        return self.calls([self.stored(layer, keys, values, table.block_size)], q_TNH, out_TNH, table, new)[0]

    def stored(self, layer: LayerSpec, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> StoredLayer:
        """What `calls` takes of a layer. Good while its keys and values live."""
        numbers = _NUMBERS.pack(
            *keys.stride()[:2],
            *values.stride()[:2],
            block_size,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
        )
        return StoredLayer(_PLACE.pack(keys.data_ptr(), values.data_ptr()), numbers)

    def calls(
        self,
        layers: Sequence[StoredLayer],
        q_TNH: torch.Tensor,
        out_TNH: torch.Tensor,
        table: SegmentTable,
        new: NewKeys | None,
    ) -> list[bytes]:
        """`pack` for each of the layers, whose rows are the same."""
        pointers, num_tokens, k_stride, v_stride = (0, 0, 0), 0, 0, 0
        if new is not None:
            k_TKH, v_TKH, slots_T = new
            pointers = k_TKH.data_ptr(), v_TKH.data_ptr(), slots_T.data_ptr()
            num_tokens, k_stride, v_stride = slots_T.shape[0], k_TKH.stride(0), v_TKH.stride(0)
        strides = q_TNH.stride(0), k_stride, v_stride
        rows = _ROWS.pack(q_TNH.data_ptr(), out_TNH.data_ptr())
        step = _STEP.pack(*pointers, *table.addresses, table.num_segments, num_tokens, *strides)
        return [b"".join((rows, place, step, numbers)) for place, numbers in layers]
