"""Writes a GGUF checkpoint again with its matrices in F16, for peers that read GGUF. Runs nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import LlamaFileType

from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.gguf_names import hugging_face_names, permuted_heads

_OWN_KEYS = ("GGUF.", "general.architecture", "general.file_type")  # the writer's, not to be copied


def write_f16_gguf(checkpoint: GGUFCheckpoint, path: Path) -> None:
    """The same weights as `checkpoint`: matrices rounded to F16, vectors in F32, its other metadata unchanged.

    checkpoint: of an architecture that pluglm reads, so that tensors have Hugging Face names and an unpermuted order
    of rows; those that the file held permuted are permuted again.
    """
    source = GGUFReader(checkpoint.path)
    architecture = str(checkpoint.metadata["general.architecture"])
    writer = GGUFWriter(path, architecture)
    _copy_metadata(source, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    present = [tensor.name for tensor in source.tensors]
    names = hugging_face_names(architecture, checkpoint.config["num_hidden_layers"], present)
    of_file = {file_name: name for name, file_name in names.items()}
    for file_name in present:
        weight = checkpoint.tensor(of_file[file_name], torch.float32)
        num_heads, num_kv_heads = checkpoint.config["num_attention_heads"], checkpoint.config["num_key_value_heads"]
        heads = permuted_heads(architecture, file_name, num_heads, num_kv_heads)
        data = (weight if heads is None else interleave_rows(weight, heads)).numpy()
        writer.add_tensor(file_name, data.astype(np.float16) if data.ndim > 1 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rows(weight_NK: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from half-split to interleaved rotary pairs: 0, D/2, 1, D/2 + 1 ...

    As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight_NK.shape
    pairs = weight_NK.view(num_heads, 2, rows // num_heads // 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _copy_metadata(source: GGUFReader, writer: GGUFWriter) -> None:
    for key, field in source.fields.items():
        if key.startswith(_OWN_KEYS):
            continue
        kind = field.types[0]
        item_kind = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, item_kind)
