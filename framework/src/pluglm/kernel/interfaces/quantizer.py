"""The contract of a weight quantizer: it makes linear layers from full-precision weights while the model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.interfaces.model import Linear

QUANTIZER_VERSION = 1

# N: output features, K: input features


class Quantizer(Component, Protocol):
    """Built as cls(config, device: str, dtype: torch.dtype), before the model loads."""

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        """A layer that computes x @ dequantised(weight).T + bias. Owns its arguments, holds no full-precision copy.

        `name` is the tensor's Hugging Face name. Raises CheckpointError when the weight cannot be quantised this way.
        """
        ...

    def dequantize(self, linear: Linear) -> torch.Tensor:
        """weight_NK float32 that a layer of this quantizer stands for (the plain reference of its arithmetic)."""
        ...
