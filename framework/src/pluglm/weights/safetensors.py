"""Reads Hugging Face model folders: config.json and safetensors, whole or in shards. Executes nothing from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.json_file import read_json_object
from pluglm.weights.messages import damaged, quoted, refusal
from pluglm.weights.safetensors_header import TensorEntry, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pickle", "*.pkl", "*.ckpt")
_LONGEST_NAME = 255  # of a file, on every common file system
_READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsCheckpoint:
    """A `Checkpoint` over a folder in the layout of a Hugging Face repository.

    folder: where config.json, tokenizer files and weights lie. Weights are `model.safetensors`, else the shards that
    `model.safetensors.index.json` names, else the only *.safetensors there is. Code that a config points to
    (`auto_map`) is never looked at. Floating-point tensors can be read; others are only listed.
    """

    folder: Path

    def __init__(self, path: Path) -> None:
        """`path`: such a folder, or one .safetensors file in it. Raises CheckpointError before any tensor is read."""
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.config: Mapping[str, Any] = read_json_object(self.folder / "config.json")
        generation = self.folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json_object(generation) if os.path.lexists(generation) else MappingProxyType({})
        )
        self._tensors = _find_tensors(path)
        self.files = tuple(sorted({file for file, _ in self._tensors.values()}))
        self._closed = False

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._tensors.get(name)
        return None if found is None else found[1].shape

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Checkpoint.tensor`. The file is mapped for this call only, so its pages leave with it."""
        if self._closed:
            raise refusal(self.path, f"was closed before tensor {quoted(name)} was read; open it again")
        if not dtype.is_floating_point:
            raise ValueError(f"weights are read as a floating-point dtype, not {dtype}")
        if name not in self._tensors:
            raise refusal(self.path, f"has no tensor {quoted(name)}; is the model_type in config.json right?")
        file, entry = self._tensors[name]
        if entry.dtype not in _READABLE:
            readable = ", ".join(_READABLE)
            raise refusal(file, f"tensor {quoted(name)} is {entry.dtype}; only {readable} are read as weights")
        return _read(file, name, entry, dtype)

    def read_bytes(self, name: str) -> int:
        """The stored tensor, whose mapped pages count for this process until it is converted."""
        _, entry = self._tensors[name]
        return entry.end - entry.begin

    def close(self) -> None:
        self._closed = True


def _read(file: Path, name: str, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            mapped = handle.get_tensor(name)
            if tuple(mapped.shape) != entry.shape or mapped.dtype != _READABLE[entry.dtype]:
                raise refusal(file, f"tensor {quoted(name)} changed after the file was opened; load the model again")
            fresh: torch.Tensor = mapped.to(dtype, copy=True, memory_format=torch.contiguous_format)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise damaged(file, f"tensor {quoted(name)} cannot be read ({error})") from error
    return fresh


def _find_tensors(path: Path) -> dict[str, tuple[Path, TensorEntry]]:
    if path.is_file():
        return {name: (path, entry) for name, entry in read_header(path).items()}
    if not (path / _SINGLE).is_file() and (path / _INDEX).is_file():
        return _sharded(path)
    file = _only_file(path)
    return {name: (file, entry) for name, entry in read_header(file).items()}


def _only_file(folder: Path) -> Path:
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        shown = ", ".join(file.name for file in files[:4])
        raise refusal(folder, f"holds {len(files)} safetensors files ({shown}) and no {_INDEX} that says how they join")
    for pattern in _PICKLES:
        for pickle in folder.glob(pattern):
            raise pickle_refusal(pickle)
    raise refusal(folder, f"holds no weights: neither {_SINGLE} nor {_INDEX} nor another *.safetensors file")


def _sharded(folder: Path) -> dict[str, tuple[Path, TensorEntry]]:
    index = folder / _INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "has no table weight_map")
    headers = {shard: _shard_header(folder, shard) for shard in sorted(set(_shard_names(index, weight_map)))}
    owners: dict[str, str] = {}
    for shard, entries in headers.items():
        for name in entries:
            if name in owners:
                raise damaged(folder, f"tensor {quoted(name)} is in two shards, {owners[name]} and {shard}")
            owners[name] = shard
    for name, shard in weight_map.items():
        if owners.get(name) != shard:
            raise damaged(folder / shard, f"lacks tensor {quoted(name)}, which {_INDEX} places in it")
    return {name: (folder / shard, headers[shard][name]) for name, shard in owners.items()}


def _shard_names(index: Path, weight_map: dict[str, Any]) -> list[str]:
    for shard in weight_map.values():
        plain = (
            isinstance(shard, str)
            and len(shard) <= _LONGEST_NAME
            and not set(shard) & set("/\\:\0")
            and shard not in ("", ".", "..")
        )
        if not plain or not shard.endswith(".safetensors"):
            raise refusal(index, f"names the shard {quoted(shard)}; only *.safetensors of its own folder are read")
    return list(weight_map.values())


def _shard_header(folder: Path, shard: str) -> dict[str, TensorEntry]:
    if not (folder / shard).is_file():
        raise refusal(folder, f"lacks the shard {quoted(shard)} that {_INDEX} names; download the model again")
    return read_header(folder / shard)


def pickle_refusal(path: Path) -> CheckpointError:
    """Why a pickled weight file is not opened."""
    return refusal(path, "is a pickle file, which can run code when it is read; convert the model to safetensors")
