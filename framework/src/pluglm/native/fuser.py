"""What the CPU backend offers a model that loads: linear layers, whole decoder layers and heads on native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.native.arena import piece_bytes
from pluglm.native.layers import NativeHead, NativeLayer, NativeTiedHead, refusal
from pluglm.native.linear import NativeLinear
from pluglm.native.stack import NativeStack
from pluglm.native.stack import refusal as stack_refusal
from pluglm.native.step import make_step

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.kernels import KernelLog
    from pluglm.kernel.interfaces.model import (
        FusedHead,
        FusedLayer,
        FusedStack,
        FusedStep,
        FusedTiedHead,
        LayerParts,
        Linear,
    )
    from pluglm.native.tools import NativeTools

# D: hidden size, V: vocabulary, N: output features, K: input features


class NativeFuser:
    """Fuser and LinearFactory of a run on native kernels. deterministic: no product may change with its rows."""

    def __init__(self, tools: NativeTools, log: KernelLog, *, deterministic: bool) -> None:
        self._tools, self._log, self._always = tools, log, deterministic
        self._name = f"native ({tools.level})"

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        passed_over = tuple((f"native ({level})", why) for level, why in self._tools.refused)
        self._log.add(KernelChoice("linear", self._name, passed_over))
        layer = NativeLinear(self._tools, weight_NK, bias_N, always_native=self._always)
        if layer.why_torch is None:
            self._log.add(KernelChoice("linear, many rows", self._name))
        else:
            self._log.add(KernelChoice("linear, many rows", "torch", ((self._name, layer.why_torch),)))
        return layer

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._tools.placed(tensor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._tools.empty(shape, dtype)

    def placed_bytes(self, num_bytes: int) -> int:
        return piece_bytes(num_bytes)

    def layer(self, parts: LayerParts) -> FusedLayer | None:
        reason = refusal(parts)
        if reason is not None:
            self._log.add(KernelChoice("decoder layer", "torch", ((self._name, reason),)))
            return None
        self._log.add(KernelChoice("decoder layer", self._name))
        return NativeLayer(self._tools, parts)

    def stack(self, layers: Sequence[FusedLayer], ropes: Sequence[int]) -> FusedStack | None:
        native = [one for one in layers if isinstance(one, NativeLayer)]
        reason = stack_refusal(native) if len(native) == len(layers) else "another fuser made some of its layers"
        if reason is not None:
            self._log.add(KernelChoice("all layers", "one by one", ((self._name, reason),)))
            return None
        self._log.add(KernelChoice("all layers", f"{self._name}, under native attention"))
        return NativeStack(self._tools, native, ropes)

    def step(self, embedding_VD: torch.Tensor | None, stack: FusedStack, head: FusedHead) -> FusedStep | None:
        found = make_step(embedding_VD, stack, head)
        if isinstance(found, str):
            self._log.add(KernelChoice("ids to logits", "part by part", ((self._name, found),)))
            return None
        self._log.add(KernelChoice("ids to logits", f"{self._name}, under native attention"))
        return found

    def head(self, norm_D: torch.Tensor, eps: float, head: Linear | torch.Tensor) -> FusedHead | None:
        """A tied head comes as the embedding [V, D], which is used in place."""
        if isinstance(head, torch.Tensor):
            head = NativeLinear(self._tools, head, None, always_native=self._always, shared=True)
        if not isinstance(head, NativeLinear):
            self._log.add(KernelChoice("head", "torch", ((self._name, f"its product is {type(head).__name__}"),)))
            return None
        self._log.add(KernelChoice("head", self._name))
        return NativeHead(self._tools, norm_D, eps, head)

    def tied_head(self, norm_D: torch.Tensor, eps: float, embedding_VD: torch.Tensor) -> FusedTiedHead:
        self._log.add(KernelChoice("head", self._name))
        head = NativeLinear(self._tools, embedding_VD, None, always_native=self._always)
        return NativeTiedHead(self._tools, norm_D, eps, head)
