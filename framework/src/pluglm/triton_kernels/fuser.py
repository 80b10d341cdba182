"""What the CUDA backend offers a model that loads: whole decoder layers and heads around Triton's row kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.triton_kernels.layers import TritonHead, TritonLayer, layer_refusal, width_refusal

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.kernels import KernelLog
    from pluglm.kernel.interfaces.model import FusedHead, FusedLayer, LayerParts, Linear

# D: hidden size, V: vocabulary

KERNEL = "triton"


class TritonFuser:
    """Fuser of a run on Triton kernels. Linear layers are left to their makers, so those of a quantizer are fused too.

    device: a torch device name, where the weights are.
    """

    def __init__(self, device: str, log: KernelLog) -> None:
        self._device, self._log = device, log

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def placed_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def layer(self, parts: LayerParts) -> FusedLayer | None:
        return TritonLayer(parts) if self._can_run("decoder layer", layer_refusal(parts)) else None

    def head(self, norm_D: torch.Tensor, eps: float, head: Linear | torch.Tensor) -> FusedHead | None:
        """A tied head comes as the embedding [V, D], which is used in place."""
        if not self._can_run("head", width_refusal(norm_D)):
            return None
        product = partial(functional.linear, weight=head) if isinstance(head, torch.Tensor) else head
        return TritonHead(norm_D, eps, product)

    def _can_run(self, operation: str, reason: str | None) -> bool:
        choice = KernelChoice(operation, KERNEL)
        if reason is not None:
            choice = KernelChoice(operation, "torch", ((KERNEL, reason),))
        self._log.add(choice)
        return reason is None
