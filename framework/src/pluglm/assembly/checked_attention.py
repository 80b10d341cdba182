"""Guards the model against an attention component that returns the wrong shape or dtype."""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.attention import Attention, GraphAttention, NativeCallAttention
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


class CheckedAttention:
    """An attention component whose output is checked before the model uses it.

    Has the methods of GraphAttention and of NativeCallAttention only if the component has them.
    """

    def __init__(self, attention: Attention, name: str) -> None:
        self._attention, self._name = attention, name
        self.plan = attention.plan
        if isinstance(attention, GraphAttention):
            self.static_plan, self.refill = attention.static_plan, attention.refill
        if isinstance(attention, NativeCallAttention):
            self.native_calls = attention.native_calls

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor:
        out_TNH = self._attention.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
        if not isinstance(out_TNH, torch.Tensor):
            raise ComponentFailure(self._name, f"returned {type(out_TNH).__name__}, not a tensor")
        if out_TNH.shape != q_TNH.shape:
            shapes = f"{list(out_TNH.shape)} where [T, N, H] is {list(q_TNH.shape)}"
            raise ComponentFailure(self._name, f"returned {shapes}")
        if out_TNH.dtype != q_TNH.dtype:
            raise ComponentFailure(self._name, f"returned {out_TNH.dtype} where the queries are {q_TNH.dtype}")
        return out_TNH
