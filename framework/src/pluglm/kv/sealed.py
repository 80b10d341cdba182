"""Tensors and a JSON document in one safetensors file, sealed by checksums. Knows nothing of what they mean.

The checksums (BLAKE2b, RFC 7693) tell a damaged or torn file from a whole one; they are no signature.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load, save


class UnreadableFileError(Exception):
    """The file is damaged, or of another kind or format; the message says what is wrong, without the file's name."""


class SealedTensor(BaseModel):
    """What a tensor must look like. dtype: a torch name; checksum: of its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    shape: tuple[int, ...]
    checksum: str


class _Contents(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str
    document: dict[str, Any]
    tensors: dict[str, SealedTensor]


def seal(kind: str, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file's bytes. kind: name and version of the document's format; document: JSON data."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sealed = {name: _sealed(tensor) for name, tensor in tensors.items()}
    contents = _Contents(kind=kind, document=dict(document), tensors=sealed).model_dump_json()
    return bytes(save(dict(tensors), {"contents": contents, "checksum": _checksum(contents.encode())}))


class SealedFile:
    """The bytes of such a file. Raises UnreadableFileError unless the document is whole and of this kind."""

    def __init__(self, kind: str, data: bytes) -> None:
        self._data = data
        contents = _metadata(data)
        if contents.kind != kind:
            raise UnreadableFileError(f"holds '{contents.kind}', and '{kind}' is read here")
        self.document, self.shapes = contents.document, contents.tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Raises UnreadableFileError unless every tensor is as it was written."""
        try:
            found: dict[str, torch.Tensor] = load(self._data)
        except Exception as error:  # the library raises many kinds, by what is damaged
            raise UnreadableFileError(f"is damaged: {' '.join(str(error).split())}") from error
        if found.keys() != self.shapes.keys():
            raise UnreadableFileError("is damaged: the names of its tensors have changed")
        for name, tensor in found.items():
            is_shaped = (_dtype(tensor), tuple(tensor.shape)) == (self.shapes[name].dtype, self.shapes[name].shape)
            if not is_shaped or _checksum(_bytes(tensor)) != self.shapes[name].checksum:
                raise UnreadableFileError(f"is damaged: tensor '{name}' has not the checksum that it was written with")
        return found


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The whole file. Raises UnreadableFileError when that cannot be, or it is larger than most_bytes."""
    try:
        if path.exists() and not path.is_file():
            raise UnreadableFileError("is no file")
        with path.open("rb") as stream:
            data = stream.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise UnreadableFileError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > most_bytes:
        raise UnreadableFileError(f"is larger than {most_bytes} bytes, the most that can be used of it")
    return data


def write_whole(path: Path, data: bytes, is_durable: bool = True) -> None:
    """The file appears complete or not at all, a durable one also when the machine stops. Raises OSError, ValueError.

    Only its owner may read it: KV gives away what the prompt was. It takes the place of a file, never of a folder, a
    device or a pipe.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            if is_durable:
                os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if is_durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name last, where the system can do that for folders."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _metadata(data: bytes) -> _Contents:
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        contents, checksum = metadata["contents"], metadata["checksum"]
        if not isinstance(contents, str) or checksum != _checksum(contents.encode()):
            raise UnreadableFileError("is damaged: its header has not the checksum that it was written with")
        return _Contents.model_validate_json(contents)
    except (ValidationError, ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        raise UnreadableFileError("is damaged, or no file of saved KV: it has no readable header") from error


def _sealed(tensor: torch.Tensor) -> SealedTensor:
    return SealedTensor(dtype=_dtype(tensor), shape=tuple(tensor.shape), checksum=_checksum(_bytes(tensor)))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().data


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
