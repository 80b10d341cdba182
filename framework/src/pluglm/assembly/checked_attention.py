"""Guards the model against an attention component that returns the wrong shape."""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


class CheckedAttention:
    """An attention component whose output shape is checked before the model uses it."""

    def __init__(self, attention: Attention, name: str) -> None:
        self._attention, self._name = attention, name
        self.plan = attention.plan

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor:
        out_TNH = self._attention.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
        if getattr(out_TNH, "shape", None) != q_TNH.shape:
            got = list(getattr(out_TNH, "shape", [])) or type(out_TNH).__name__
            raise ComponentFailure(self._name, f"returned {got} where [T, N, H] is {list(q_TNH.shape)}")
        return out_TNH
