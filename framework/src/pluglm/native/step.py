"""From token ids to logits in one native call: embedding, rotary angles, all layers, final norm and head."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pluglm.native.layers import NativeHead, NativeTiedHead
from pluglm.native.linear import dense
from pluglm.native.stack import NativeStack, Source

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.model import AttentionCall, FusedHead, FusedStack

# T: rows, D: hidden size, V: vocabulary, P: positions of a table, H: head dim

_GATHER = 6  # numbers of one gather


class Table(NamedTuple):
    """Rows [V, D] in memory, as they are or packed as native weights are."""

    memory: torch.Tensor
    is_packed: bool = False


class NativeStep:
    """A FusedStep. Its plain reference is indexing, the stack and the head one after another: the bits are the same.

    embedding, stack and head have one dtype and one width.
    """

    def __init__(self, embedding: Table, stack: NativeStack, head: NativeHead) -> None:
        self._embedding, self._stack, self._head = embedding, stack, head
        self._most_rows = min(stack.most_rows, head.most_rows)

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        angles_P1H: Sequence[torch.Tensor],
        attend: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        num_rows, stack, head = token_ids_T.shape[0], self._stack, self._head
        found = stack.enter(num_rows, attend) if num_rows <= self._most_rows else None
        if found is None:
            return None
        room, calls = found
        ids_T, positions_T = (dense(one, torch.int64, (num_rows,)) for one in (token_ids_T, positions_T))
        tables = [dense(one, stack.dtype, (one.shape[0], 1, stack.head_dim)) for one in angles_P1H]
        hidden_TD, logits_TV = torch.empty((num_rows, stack.width), dtype=stack.dtype), head.empty(num_rows)
        numbers = _gather(self._embedding, ids_T, hidden_TD)
        for table_P1H, angles_T1H in zip(tables, room.angles.tensors, strict=False):  # the last ones may have no layer
            numbers += _gather(Table(table_P1H), positions_T, angles_T1H)
        gathers = array("Q", numbers)
        source = Source(gathers=gathers.buffer_info()[0], num_gathers=len(numbers) // _GATHER)
        stack.run(room, calls, room.angles, hidden_TD, source, head.logits(logits_TV))
        return hidden_TD, logits_TV


def make_step(embedding_VD: torch.Tensor | None, stack: FusedStack, head: FusedHead) -> NativeStep | str:
    """The step of these parts, or why there is none. embedding_VD: None where the head took it over."""
    if not isinstance(stack, NativeStack) or not isinstance(head, NativeHead):
        return "another fuser made its layers or its head"
    if isinstance(head, NativeTiedHead):
        table = Table(head.embedding.memory, head.embedding.is_packed)
    elif embedding_VD is not None:
        table = Table(embedding_VD.contiguous())
    else:
        return "its head took over no embedding, and there is no other"
    if not table.memory.dtype == stack.dtype == head.dtype or table.memory.shape[1:] != (stack.width,):
        return "its embedding, layers and head differ in dtype or width"
    return NativeStep(table, stack, head)


def _gather(table: Table, ids_T: torch.Tensor, to_T: torch.Tensor) -> tuple[int, ...]:
    """struct Gather of src/stack.cpp."""
    rows = table.memory
    num_bytes = rows.stride(0) * rows.itemsize
    return rows.data_ptr(), num_bytes, rows.shape[0], ids_T.data_ptr(), to_T.data_ptr(), int(table.is_packed)
