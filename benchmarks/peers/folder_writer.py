"""Writes a checkpoint as a Hugging Face folder in bfloat16, for peers that read those. Runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.text.load import load_tokenizer

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """config.json, model.safetensors and the tokenizer's files. Raises ValueError for a model_type but llama."""
    config = dict(checkpoint.config)
    if config["model_type"] not in _ARCHITECTURES:
        raise ValueError(f"model_type {config['model_type']!r} has no folder form here; allowed: llama")
    config |= {"architectures": [_ARCHITECTURES[config["model_type"]]], "dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {name: checkpoint.tensor(name, torch.bfloat16) for name in sorted(checkpoint.names())}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(checkpoint)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1))
