"""Attention over stored keys and values in one native call a layer, which can store the new ones first.

Its plain torch reference is the `naive` attention plugin.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pluglm.native.tools import DTYPES

if TYPE_CHECKING:
    from pluglm.kernel.core import Segment
    from pluglm.kernel.interfaces.model import LayerSpec
    from pluglm.native.tools import NativeTools

# T: tokens of the flat batch, N: query heads, K: kv heads (N is a multiple of K), H: head dim, S: slots of the store

_MOST_HEAD_DIM = 1024  # beyond it a span of keys fits no cache, and the scratch memory of a thread reaches 10 MB

# struct Attention of src/attention.h: nine pointers, nine int64, five int32, two floats. Packing them at once costs a
# quarter of what filling in a ctypes.Structure does.
_CALL = struct.Struct("@9Q9q5i2f")


_FEW = 64  # numbers of which Python finds the largest before torch has begun to look


@dataclass(frozen=True, slots=True)
class SegmentTable:
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


class NewKeys(NamedTuple):
    """Rows to store: k_TKH and v_TKH, whose tokens may be any distance apart, at slots_T (int64)."""

    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    slots_T: torch.Tensor


def slots_reached(slots_T: torch.Tensor) -> int:
    """How many slots a store must have to take rows at slots_T. ValueError unless they are int64, dense and from 0."""
    if slots_T.dtype != torch.int64:
        raise ValueError(f"the native attention takes slots as dense int64, not {slots_T.dtype}")
    if not slots_T.is_contiguous():
        raise ValueError(f"the native attention takes slots as dense int64, not of stride {slots_T.stride()}")
    return _reached(slots_T.tolist() if len(slots_T) <= _FEW else slots_T)


def _reached(places: Sequence[int] | torch.Tensor) -> int:
    """One more than the largest of slots or blocks. ValueError for one that is negative."""
    if isinstance(places, torch.Tensor):
        low, high = (int(one) for one in places.aminmax())
    else:
        low, high = min(places, default=0), max(places, default=-1)
    if low < 0:
        raise ValueError(f"{low} is no slot and no block of the store of keys and values")
    return high + 1


class NativeAttention:
    """Causal attention in float32 or bfloat16, the softmax and all sums in float32.

    In float32 a row's bits depend on nothing but the keys and values that it sees: not on its batch, chunk, block size
    or threads, nor on multiples of 64 tokens that no row sees being dropped. In bfloat16 the softmax's weights are
    rounded to bfloat16 where the CPU multiplies that. Method: FlashAttention-2 (arXiv:2307.08691) in spans of 512 keys.
    """

    def __init__(self, tools: NativeTools) -> None:
        self._tools = tools
        self._attend = tools.library.pluglm_attention

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
        blocks: list[int] = []
        num_rows = 0
        for one in segments:
            start, num_query, num_context, table = one.query_start, one.num_query, one.num_context, one.block_table
            if len(table) * block_size < num_context + num_query:
                raise ValueError(f"{len(table)} blocks of {block_size} hold no {num_context + num_query} keys")
            numbers += (start, num_query, num_context, len(blocks))
            blocks += table
            if start + num_query > num_rows:
                num_rows = start + num_query
        out_of_range = ValueError("a segment's rows and tokens, and its blocks, are numbers of 31 bits from 0")
        try:
            rows, tables = array("I", numbers), array("i", blocks)  # unsigned, since that refuses negative ones
        except OverflowError:
            raise out_of_range from None
        if max(numbers, default=0) >= 2**31:  # the kernels read them as signed
            raise out_of_range
        num_blocks = _reached(blocks if len(blocks) <= _FEW else torch.frombuffer(tables, dtype=torch.int32))
        addresses = rows.buffer_info()[0], tables.buffer_info()[0]
        return SegmentTable(rows, tables, block_size, addresses, num_rows, num_blocks * block_size)

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

    @property
    def function(self) -> int:
        """The address of what takes a packed call, as NativeCalls has it."""
        return ctypes.cast(self._attend, ctypes.c_void_p).value or 0

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
        pointers, num_tokens, k_stride, v_stride = (0, 0, 0), 0, 0, 0
        if new is not None:
            k_TKH, v_TKH, slots_T = new
            pointers = k_TKH.data_ptr(), v_TKH.data_ptr(), slots_T.data_ptr()
            num_tokens, k_stride, v_stride = len(slots_T), k_TKH.stride(0), v_TKH.stride(0)
        return _CALL.pack(
            q_TNH.data_ptr(),
            out_TNH.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            *pointers,
            *table.addresses,
            table.num_segments,
            num_tokens,
            q_TNH.stride(0),
            k_stride,
            v_stride,
            *keys.stride()[:2],
            *values.stride()[:2],
            table.block_size,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
        )
