"""The native kernel as a plugin runs it: C++ on the CPU, over block tables in place; it stores new keys as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pluglm.kernel.interfaces.attention import AttentionBatch, HeadRows, NativeCalls
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys, SegmentTable, StoredLayer, slots_reached

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim

_FEW_ROWS = 64  # of steps that decode, whose heads come again; those of prompts are not kept from being freed

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def refusal(context: BuildContext) -> str | None:
    """Why it cannot run a context whose `tools` are NativeTools, or None."""
    if context.deterministic and context.dtype != "float32":
        return f"in {context.dtype} a row's bits may depend on its batch"
    attention, dtype = NativeAttention(context.tools), getattr(torch, context.dtype)
    reasons = (attention.can_run(dtype, layer.head_dim) for layer in context.spec.layers)
    return next((reason for reason in reasons if reason is not None), None)


class NativePlan(NamedTuple):
    """slots_T: where new keys and values go; num_slots: what they and the segments' blocks reach of the store."""

    slots_T: torch.Tensor
    table: SegmentTable
    num_slots: int


class _Layer(NamedTuple):
    """What was found when a layer's storage was looked at: how many slots it has, and the layer's pieces of a call."""

    spec: LayerSpec
    num_slots: int
    stored: StoredLayer


@dataclass(frozen=True, slots=True)
class _Storage:
    """Layers by index. The storage of each is looked at once: it stays what it is as long as the store does."""

    kv: KVStore | None
    dtype: torch.dtype
    block_size: int
    layers: dict[int, _Layer] = field(default_factory=dict)


class _Ready:
    """What was found right for layers whose heads lie in the same place in one step after another."""

    def __init__(
        self, layers: Sequence[LayerSpec], heads: HeadRows, kv: KVStore, block_size: int, found: list[_Layer]
    ) -> None:
        self._layers, self._heads, self._kv, self._block_size = layers, heads, kv, block_size
        self._num_slots = min([one.num_slots for one in found])
        self._num_rows = min([x.shape[0] for x in heads])
        self.stored = [one.stored for one in found]

    def fits(self, layers: Sequence[LayerSpec], heads: HeadRows, plan: NativePlan, kv: KVStore) -> bool:
        """False where all has to be looked at again, to say what is wrong or to find that nothing is."""
        is_same = layers is self._layers and heads is self._heads and kv is self._kv
        num_rows = max(plan.table.num_rows, plan.slots_T.shape[0])
        is_reached = plan.num_slots <= self._num_slots and num_rows <= self._num_rows
        return is_same and is_reached and plan.table.block_size == self._block_size


class NativeKernel:
    """Of a context that `refusal` accepts. In float32 a row's bits depend on the keys and values that it sees only."""

    def __init__(self, context: BuildContext) -> None:
        self._native = NativeAttention(context.tools)
        self._storage = _Storage(None, torch.float32, 0)
        self._ready: _Ready | None = None

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
        q_TNH, k_TKH, v_TKH = (_dense_rows(x) for x in (q_TNH, k_TKH, v_TKH))
        self._checked([layer], (q_TNH, k_TKH, v_TKH), plan, kv)
        keys, values = kv.keys(layer.index), kv.values(layer.index)
        return self._native.attend(layer, q_TNH, plan.table, keys, values, NewKeys(k_TKH, v_TKH, plan.slots_T))

    def native_calls(
        self, layers: Sequence[LayerSpec], heads: HeadRows, plan: NativePlan, kv: KVStore
    ) -> NativeCalls | None:
        """What `run` does for these layers, whose heads lie as the kernel takes them; else None."""
        q_TNH, k_TKH, v_TKH, out_TNH = heads
        ready = self._ready
        if ready is None or not ready.fits(layers, heads, plan, kv):
            if not (_is_dense(q_TNH) and _is_dense(k_TKH) and _is_dense(v_TKH)):
                return None
            found = self._checked(layers, (q_TNH, k_TKH, v_TKH), plan, kv)
            ready = _Ready(layers, heads, kv, plan.table.block_size, found)
            self._ready = ready if q_TNH.shape[0] <= _FEW_ROWS else None
        new = NewKeys(k_TKH, v_TKH, plan.slots_T)
        calls = self._native.calls(ready.stored, q_TNH, out_TNH, plan.table, new)
        return NativeCalls(self._native.function, calls, (plan, kv))

    def _checked(self, layers: Sequence[LayerSpec], rows: QKV, plan: NativePlan, kv: KVStore) -> list[_Layer]:
        """ValueError for what would make the kernel, which sees addresses only, read or write somewhere else."""
        q_TNH, k_TKH, v_TKH = rows
        found, first = self._layers(layers, q_TNH.dtype, plan.table.block_size, kv), layers[0]
        num_slots = min([one.num_slots for one in found])
        if plan.num_slots > num_slots:
            raise ValueError(
                f"slots and blocks of the step reach {plan.num_slots} slots, and the store has {num_slots}"
            )
        num_new, key_shape = plan.slots_T.shape[0], (first.num_kv_heads, first.head_dim)
        _require("queries", q_TNH, (max(plan.table.num_rows, num_new), first.num_heads, first.head_dim), q_TNH.dtype)
        _require("keys", k_TKH, (num_new, *key_shape), q_TNH.dtype)
        _require("values", v_TKH, (num_new, *key_shape), q_TNH.dtype)
        return found

    def _layers(self, layers: Sequence[LayerSpec], dtype: torch.dtype, block_size: int, kv: KVStore) -> list[_Layer]:
        storage = self._storage
        if storage.kv is not kv or storage.dtype != dtype or storage.block_size != block_size:
            storage = self._storage = _Storage(kv, dtype, block_size)
        found = []
        for spec in layers:
            layer = storage.layers.get(spec.index)
            if layer is None or layer.spec is not spec:
                stored = self._native.stored(spec, kv.keys(spec.index), kv.values(spec.index), block_size)
                layer = storage.layers[spec.index] = _Layer(spec, _slots_of(spec, dtype, kv), stored)
            found.append(layer)
        return found


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
    return x if _is_dense(x) else x.contiguous()


def _is_dense(x: torch.Tensor) -> bool:
    _, head_stride, stride = x.stride()
    return stride == 1 and head_stride == x.shape[2]
