"""What every quantizer demands of a weight before it touches it."""

from __future__ import annotations

import torch

from pluglm.kernel.errors import CheckpointError


def require_matrix(name: str, weight: torch.Tensor) -> None:
    """CheckpointError unless the weight is a floating-point matrix with entries."""
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        shape = tuple(weight.shape)
        raise CheckpointError(
            f"{name}: cannot quantise a {weight.dtype} tensor of shape {shape}; a float matrix is needed"
        )


def require_finite(name: str, scale: torch.Tensor) -> None:
    """CheckpointError when a scale shows that the weight holds NaN or infinity, or overflows the model's dtype."""
    if not bool(scale.isfinite().all()):
        raise CheckpointError(
            f"{name}: holds NaN, infinity or values beyond {scale.dtype}; use another dtype or checkpoint"
        )
