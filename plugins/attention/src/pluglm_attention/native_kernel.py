"""The native kernel as a plugin runs it: C++ on the CPU, over block tables in place; it stores new keys as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pluglm.kernel.interfaces.attention import AttentionBatch, HeadRows, NativeCalls
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys, SegmentTable

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


def refusal(context: BuildContext) -> str | None:
    """Why it cannot run a context whose `tools` are NativeTools, or None."""
    if context.deterministic and context.dtype != "float32":
        return f"in {context.dtype} a row's bits may depend on its batch"
    attention, dtype = NativeAttention(context.tools), getattr(torch, context.dtype)
    reasons = (attention.can_run(dtype, layer.head_dim) for layer in context.spec.layers)
    return next((reason for reason in reasons if reason is not None), None)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """slots_T: where new keys and values go."""

    slots_T: torch.Tensor
    table: SegmentTable


class NativeKernel:
    """Of a context that `refusal` accepts. In float32 a row's bits depend on the keys and values that it sees only."""

    def __init__(self, context: BuildContext) -> None:
        self._native = NativeAttention(context.tools)

    def plan(self, batch: AttentionBatch) -> NativePlan:
        return NativePlan(batch.slots_T, self._native.plan(batch.segments, batch.block_size))

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
        _require_one_dtype(q_TNH, k_TKH, v_TKH, keys, values)
        return self._native.attend(layer, q_TNH, plan.table, keys, values, NewKeys(k_TKH, v_TKH, plan.slots_T))

    def native_calls(
        self, layers: Sequence[LayerSpec], heads: HeadRows, plan: NativePlan, kv: KVStore
    ) -> NativeCalls | None:
        """What `run` does for these layers, whose heads lie as the kernel takes them; else None."""
        q_TNH, k_TKH, v_TKH, out_TNH = heads
        stores = [(kv.keys(one.index), kv.values(one.index)) for one in layers]
        if any(_dense_rows(x) is not x for x in (q_TNH, k_TKH, v_TKH)):
            return None
        _require_one_dtype(q_TNH, k_TKH, v_TKH, *(tensor for pair in stores for tensor in pair))
        new = NewKeys(k_TKH, v_TKH, plan.slots_T)
        calls = [
            self._native.pack(layer, q_TNH, out_TNH, plan.table, keys, values, new)
            for layer, (keys, values) in zip(layers, stores, strict=True)
        ]
        return NativeCalls(self._native.function, calls, (plan, stores))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with the heads of a token side by side, as the kernel takes them; tokens may be any distance apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _require_one_dtype(q_TNH: torch.Tensor, *others: torch.Tensor) -> None:
    """The kernel sees addresses only, and would read another dtype as this one."""
    for one in others:
        if one.dtype != q_TNH.dtype:
            raise ValueError(f"the native attention takes queries, keys and values of one dtype, not {one.dtype} too")
