"""What the plugins that choose among kernels have in common: one kernel for the whole run, chosen when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, DETERMINISTIC, KV_FORMATS, Capabilities
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.bounds import ROUNDED_WEIGHTS
from pluglm_attention.kernel_choice import BY_SHAPE, BY_SPLITS, NOT_ENCODED, AttentionKernel, KernelConfig
from pluglm_attention.native_kernel import NativeKernel

_HINT = "set attention.kernel: auto"
_NOT_DETERMINISTIC = {"torch": f"{BY_SHAPE}; {_HINT}", "triton": f"{BY_SPLITS}; {_HINT}"}

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


class KernelAttention(Attention):
    """Hands everything to its kernel. ERROR_BOUNDS: by dtype, as in `bounds`, of whichever kernel."""

    interface_version = 1
    Config = KernelConfig
    ERROR_BOUNDS: ClassVar[Mapping[str, float]] = ROUNDED_WEIGHTS

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        if isinstance(kernel, NativeKernel):  # the others have no calls to offer, and must not seem to
            self.native_calls = kernel.native_calls

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        """By the kernel that is named; `auto` finds one for every run."""
        kernel, provides, refuses = config.kernel, {BATCH_INVARIANT, KV_FORMATS}, dict[str, str]()
        if kernel in _NOT_DETERMINISTIC:
            provides.discard(BATCH_INVARIANT)
            refuses[DETERMINISTIC] = _NOT_DETERMINISTIC[kernel]
        if kernel == "native":
            provides.discard(KV_FORMATS)
            refuses["slot:kv_format"] = f"{NOT_ENCODED}; {_HINT}"
        return Capabilities(provides=frozenset(provides), refuses=refuses)

    def plan(self, batch: AttentionBatch) -> Any:
        return self._kernel.plan(batch)

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor:
        return self._kernel.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
