"""Finds the tokenizer of an opened checkpoint: in the GGUF file itself, or in the folder of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pluglm.kernel.errors import TokenizerError
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.text.folder import tokenizer_from_folder
from pluglm.text.gguf_tokenizer import tokenizer_from_gguf
from pluglm.text.tokenizer import Tokenizer


@runtime_checkable
class HasMetadata(Protocol):
    """A checkpoint in one file that carries its vocabulary as key-value pairs (GGUF)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@runtime_checkable
class HasFolder(Protocol):
    """A checkpoint in a folder, with the tokenizer's files beside the weights."""

    @property
    def folder(self) -> Path: ...


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer.

    A GGUF file's ids are those of transformers' GGUF reader; tokenizer_from_gguf offers the other rules.
    Raises TokenizerError naming the file and the fix when the checkpoint has no tokenizer or a damaged one.
    """
    if isinstance(checkpoint, HasMetadata):
        return tokenizer_from_gguf(checkpoint.metadata, checkpoint.path)
    if isinstance(checkpoint, HasFolder):
        return tokenizer_from_folder(checkpoint.folder)
    raise TokenizerError(
        f"{checkpoint.path}: {type(checkpoint).__name__} has neither GGUF metadata nor a folder, so no tokenizer; "
        "send token ids, or use a checkpoint that carries a tokenizer"
    )
