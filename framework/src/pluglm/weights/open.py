"""Chooses the reader for a path by what lies there, not by its name. Downloads and looks up nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.weights.byte_source import ByteSource
from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.gguf_header import MAGIC
from pluglm.weights.messages import refusal
from pluglm.weights.safetensors import SafetensorsCheckpoint, pickle_refusal


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, a .safetensors file, or a folder with either.

    A folder is read as safetensors when it holds any, else as its only GGUF file. Raises CheckpointError when there is
    nothing of the kind, when the choice is not clear, and for pickled weights.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise refusal(path, "does not exist; give a GGUF file, a .safetensors file or a model folder")
    if not path.is_file():
        raise refusal(path, "is neither a file nor a folder; give a GGUF file, a .safetensors file or a model folder")
    return _open_file(path)


def _open_folder(folder: Path) -> Checkpoint:
    ggufs = sorted(folder.glob("*.gguf"))
    if not ggufs or any(folder.glob("*.safetensors*")):
        return SafetensorsCheckpoint(folder)
    if len(ggufs) > 1:
        shown = ", ".join(file.name for file in ggufs[:4])
        raise refusal(folder, f"holds {len(ggufs)} GGUF files ({shown}); give the path of one")
    return GGUFCheckpoint(ggufs[0])


def _open_file(path: Path) -> Checkpoint:
    with ByteSource(path) as source:
        start = bytes(source.read(0, min(source.size, 16)))
    if start[:4] == MAGIC:
        return GGUFCheckpoint(path)
    if start[:1] == b"\x80" and start[1:2] <= b"\x05" and start[8:9] != b"{":
        raise pickle_refusal(path)
    if zipfile.is_zipfile(path):
        raise pickle_refusal(path)
    if start[8:9] == b"{" or path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path)
    raise refusal(path, "is neither GGUF nor safetensors; convert the model to one of them")
