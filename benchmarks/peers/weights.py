"""The default model's weights in each form that a contender reads, written once under the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peers.folder_writer import write_folder
from peers.gguf_writer import write_f16_gguf
from pluglm.text.load import load_tokenizer
from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.open import open_checkpoint
from pluglm.weights.resolve import resolve_model

PROMPT = "The history of the printing press begins in the fifteenth century, when"


class Weights(NamedTuple):
    """paths: "gguf" (F16) and "folder" (bfloat16). prompt_ids: a text's tokens, to compare what is generated."""

    config: Mapping[str, Any]
    paths: dict[str, Path]
    prompt_ids: list[int]


def prepare_weights(model: str, cache: Path) -> Weights:
    """Raises ValueError when the model is not a GGUF file: the peers' GGUF takes its metadata from it."""
    source = resolve_model(model)
    checkpoint = open_checkpoint(source)
    try:
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise ValueError(f"model {model!r} is no GGUF file; give one, peers need its metadata")
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
        folder = cache / "weights" / digest
        folder.mkdir(parents=True, exist_ok=True)
        paths, done = {"gguf": folder / "f16.gguf", "folder": folder / "bf16"}, folder / "written"
        if not done.exists():
            write_f16_gguf(checkpoint, paths["gguf"])
            write_folder(checkpoint, paths["folder"])
            done.touch()
        return Weights(dict(checkpoint.config), paths, load_tokenizer(checkpoint).encode(PROMPT))
    finally:
        checkpoint.close()
