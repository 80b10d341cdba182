"""The target as training needs it: its embedding, and its final norm and head with gradients. Its layers stay still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from pluglm.arguments import silent
from pluglm.assembly.registry import find, load
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.model import Model, ModelContext, ModelSpec
from pluglm.kernel.interfaces.target import DraftSource
from pluglm.weights.open import open_checkpoint
from pluglm.weights.resolve import resolve_model

# T: tokens, R: rows, D: hidden size, V: the target's logits


@dataclass(frozen=True, slots=True)
class Teacher:
    """embed: token_ids_T (int64) -> x_TD. logits: hidden_RD -> logits_RV float32, through which gradients pass."""

    spec: ModelSpec
    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]


def load_teacher(model: str, device: str = "cpu") -> Teacher:
    """A path, a name that a package registers, or a hub id; in float32. Raises CheckpointError.

    PluginError for an unknown family.
    """
    checkpoint = open_checkpoint(resolve_model(model))
    try:
        family = load(find(("model",), str(checkpoint.config.get("model_type"))))
        context = ModelContext(
            device=device,
            dtype=torch.float32,
            make_linear=DenseLinear,  # fast layers pass no gradient
            map_rows=whole_rows,
            progress=silent,
        )
        loaded: Model = family.load(checkpoint, context)
    finally:
        checkpoint.close()
    if not isinstance(loaded, DraftSource):
        raise CheckpointError(
            f"{model}: family '{loaded.spec.family}' lends no embeddings, so no head can go on from it"
        )
    return Teacher(loaded.spec, cast(DraftSource, loaded).embed, loaded.logits)
