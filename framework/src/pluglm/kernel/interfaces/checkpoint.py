"""The contract between weight files and model families: a config dictionary and tensors by their Hugging Face names.

A model family reads only this, so it never knows whether safetensors or GGUF stood behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """One opened checkpoint. Opening checks every header, offset, shape and dtype, and reads no tensor data.

    path: the file or folder it was opened from (for messages).
    files: those that tensors are read from, by name.
    config: the model's configuration in the shape and key names of a Hugging Face config.json (`model_type`,
        `hidden_size`, `rope_scaling` ...); for GGUF it is translated from the metadata. Read-only.
    generation_config: the contents of generation_config.json, or {}.
    """

    path: Path
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor with this Hugging Face name (rows first), or None when the checkpoint lacks it."""
        ...

    def names(self) -> frozenset[str]:
        """All tensors, by Hugging Face name where one is known, else by the file's own name."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as a fresh contiguous CPU tensor of `dtype`, dequantised and un-permuted where the file needs it.

        The caller owns the result. Raises CheckpointError (file, tensor, reason) when it is missing or unreadable.
        The checkpoint keeps no copy, so a caller that takes tensors one by one never holds two full copies.
        """
        ...

    def close(self) -> None:
        """Unmap the files. Tensors already handed out stay valid."""
        ...
