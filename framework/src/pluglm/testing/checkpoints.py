"""A checkpoint in memory: a config and random tensors of given shapes. Keeps a list of what was read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pluglm.kernel.errors import CheckpointError


class MemoryCheckpoint:
    """A Checkpoint of tensors that depend on their names and shapes only. reads: the names handed out, in order."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = Path("memory-checkpoint")
        self.files: tuple[Path, ...] = ()
        self.config: Mapping[str, Any] = config
        self.generation_config: Mapping[str, Any] = {}
        self.reads: list[str] = []
        self._shapes = dict(shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Normal entries whose products neither vanish nor grow from layer to layer."""
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: tensor '{name}' is missing")
        self.reads.append(name)
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = float(shape[-1]) ** -0.5
        values: torch.Tensor = torch.randn(shape, generator=generator) * scale
        return values.to(dtype)

    def close(self) -> None:
        """Nothing is open."""
