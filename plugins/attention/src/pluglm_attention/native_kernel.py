"""The native kernel as a plugin runs it: C++ on the CPU, over block tables in place; it stores new keys as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pluglm.kernel.interfaces.attention import AttentionBatch, HeadRows, NativeCalls
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys, SegmentTable, slots_reached

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def refusal(context: BuildContext) -> str | None:
    """Why it cannot run a context whose `tools` are NativeTools, or None."""
    if context.deterministic and context.dtype != "float32":
        return f"in {context.dtype} a row's bits may depend on its batch"
    attention, dtype = NativeAttention(context.tools), getattr(torch, context.dtype)
    reasons = (attention.can_run(dtype, layer.head_dim) for layer in context.spec.layers)
    return next((reason for reason in reasons if reason is not None), None)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """slots_T: where new keys and values go; num_slots: what they and the segments' blocks reach of the store."""

    slots_T: torch.Tensor
    table: SegmentTable
    num_slots: int


class NativeKernel:
    """Of a context that `refusal` accepts. In float32 a row's bits depend on the keys and values that it sees only."""

    def __init__(self, context: BuildContext) -> None:
        self._native = NativeAttention(context.tools)
        self._kv: KVStore | None = None
        self._num_slots: dict[int, int] = {}  # of its layers, by index: those whose storage was checked

    def plan(self, batch: AttentionBatch) -> NativePlan:
        table = self._native.plan(batch.segments, batch.block_size)
        return NativePlan(batch.slots_T, table, max(table.num_slots, slots_reached(batch.slots_T)))

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: NativePlan,
        kv: KVStore,
    ) -> torch.Tensor:
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        q_TNH, k_TKH, v_TKH = (_dense_rows(x) for x in (q_TNH, k_TKH, v_TKH))
        self._check([layer], (q_TNH, k_TKH, v_TKH), plan, kv)
        return self._native.attend(layer, q_TNH, plan.table, keys, values, NewKeys(k_TKH, v_TKH, plan.slots_T))

    def native_calls(
        self, layers: Sequence[LayerSpec], heads: HeadRows, plan: NativePlan, kv: KVStore
    ) -> NativeCalls | None:
        """What `run` does for these layers, whose heads lie as the kernel takes them; else None."""
        q_TNH, k_TKH, v_TKH, out_TNH = heads
        stores = [(kv.keys(one.index), kv.values(one.index)) for one in layers]
        if any(_dense_rows(x) is not x for x in (q_TNH, k_TKH, v_TKH)):
            return None
        self._check(layers, (q_TNH, k_TKH, v_TKH), plan, kv)
        new = NewKeys(k_TKH, v_TKH, plan.slots_T)
        calls = [
            self._native.pack(layer, q_TNH, out_TNH, plan.table, keys, values, new)
            for layer, (keys, values) in zip(layers, stores, strict=True)
        ]
        return NativeCalls(self._native.function, calls, (plan, stores))

    def _check(self, layers: Sequence[LayerSpec], rows: QKV, plan: NativePlan, kv: KVStore) -> None:
        """ValueError for what would make the kernel, which sees addresses only, read or write somewhere else.

        The storage of a layer is looked at once: it stays what it is as long as the store does.
        """
        q_TNH, k_TKH, v_TKH = rows
        if kv is not self._kv:
            self._kv, self._num_slots = kv, {}
        for layer in layers:
            if layer.index not in self._num_slots:
                self._num_slots[layer.index] = _slots_of(layer, q_TNH.dtype, kv)
        num_slots, first = min([self._num_slots[layer.index] for layer in layers]), layers[0]
        if plan.num_slots > num_slots:
            raise ValueError(
                f"slots and blocks of the step reach {plan.num_slots} slots, and the store has {num_slots}"
            )
        num_new, key_shape = len(plan.slots_T), (first.num_kv_heads, first.head_dim)
        _require("queries", q_TNH, (max(plan.table.num_rows, num_new), first.num_heads, first.head_dim), q_TNH.dtype)
        _require("keys", k_TKH, (num_new, *key_shape), q_TNH.dtype)
        _require("values", v_TKH, (num_new, *key_shape), q_TNH.dtype)


def _slots_of(layer: LayerSpec, dtype: torch.dtype, kv: KVStore) -> int:
    stored = kv.keys(layer.index), kv.values(layer.index)
    for name, one in zip(("stored keys", "stored values"), stored, strict=True):
        _require(name, one, (0, layer.num_kv_heads, layer.head_dim), dtype)
        if one.stride(2) != 1:
            raise ValueError(f"the native attention takes {name} with dense heads, not with strides {one.stride()}")
    return min(map(len, stored))


def _require(name: str, found: torch.Tensor, least: tuple[int, int, int], dtype: torch.dtype) -> None:
    """least: the shape, of which there may be more rows."""
    num_rows, *shape = found.shape
    if num_rows < least[0] or shape != list(least[1:]) or found.dtype != dtype:
        raise ValueError(
            f"the native attention takes {name} [{least[0]} or more, {least[1]}, {least[2]}] of {dtype}, "
            f"not {list(found.shape)} of {found.dtype}"
        )


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with the heads of a token side by side, as the kernel takes them; tokens may be any distance apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
