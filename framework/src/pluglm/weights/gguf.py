"""Opens a GGUF file as a checkpoint: config translated, tensors by Hugging Face names, dequantised one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.gguf_config import translate_config
from pluglm.weights.gguf_decode import block_bytes, read_permuted, read_tensor
from pluglm.weights.gguf_header import TensorInfo, read_header
from pluglm.weights.gguf_metadata import GGUFMetadata
from pluglm.weights.gguf_names import MODEL_TYPES, added_constant, hugging_face_names, permuted_heads
from pluglm.weights.gguf_rope import FACTORS_TENSOR, scaling_of_factors
from pluglm.weights.messages import quoted, refusal

_MOST_FACTORS = 4096


class GGUFCheckpoint:
    """A `Checkpoint` over one GGUF file (version 2 or 3, little-endian, not split).

    config: see `gguf_config`. rope_scaling of type `freq_factors` names a tensor of divisors; see `gguf_rope`.
    metadata: the file's own keys, read-only and decoded at each access (token lists are `tokenizer.ggml.*`).
    generation_config: always {}.
    Opening reads the header, and of the data only `rope_freqs.weight` (one float32 for each rotary pair).
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, one line, for anything in the header that the file cannot hold or pluglm not read."""
        self.path = path
        self.files: tuple[Path, ...] = (path,)
        self._source = ByteSource(path)
        try:
            header = read_header(self._source)
            self.metadata: Mapping[str, Any] = GGUFMetadata(self._source, header.fields)
            self._tensors = header.tensors
            self._refuse_partial()
            config = translate_config(path, self.metadata, header.tensors)
            self._architecture = str(self.metadata["general.architecture"])
            self._read_rope_factors(config)
        except BaseException:
            self._source.close()
            raise
        self.config: Mapping[str, Any] = MappingProxyType(config)
        self.generation_config: Mapping[str, Any] = MappingProxyType({})
        num_layers = config["num_hidden_layers"] if self._architecture in MODEL_TYPES else 0
        self._names = hugging_face_names(self._architecture, num_layers, header.tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[self._names[name]].shape if name in self._names else None

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Checkpoint.tensor`. Beside the result, one block of 2^18 elements is held at any time."""
        if not dtype.is_floating_point:
            raise ValueError(f"weights are read as a floating-point dtype, not {dtype}")
        if name not in self._names:
            raise refusal(self.path, f"has no tensor {quoted(name)} (architecture {quoted(self._architecture)})")
        gguf_name = self._names[name]
        info = self._tensors[gguf_name]
        heads = self._permuted_heads(gguf_name, info)
        if heads is not None:
            return read_permuted(self._source, info, dtype, heads)
        return read_tensor(self._source, info, dtype, added=added_constant(self._architecture, gguf_name))

    def read_bytes(self, name: str) -> int:
        """One block, stored and in float32."""
        return block_bytes(self._tensors[self._names[name]])

    def close(self) -> None:
        self._source.close()

    def _permuted_heads(self, gguf_name: str, info: TensorInfo) -> int | None:
        if self._architecture not in MODEL_TYPES:
            return None
        num_heads, num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        heads = permuted_heads(self._architecture, gguf_name, num_heads, num_kv_heads)
        if heads is not None and info.shape[0] % (2 * heads):
            what = f"tensor {quoted(gguf_name)} has {info.shape[0]} rows, not a multiple of 2 x {heads} heads"
            raise refusal(self.path, f"{what}; convert it again")
        return heads

    def _refuse_partial(self) -> None:
        parts = self.metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise refusal(self.path, f"is one of {parts} parts; join them first with llama-gguf-split --merge")
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            raise refusal(self.path, f"holds {quoted(kind)} and not a model; take the model's own file")

    def _read_rope_factors(self, config: dict[str, Any]) -> None:
        info = self._tensors.get(FACTORS_TENSOR)
        if self._architecture not in MODEL_TYPES or info is None or config["rope_scaling"] is not None:
            return
        if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > _MOST_FACTORS:
            raise refusal(self.path, f"{FACTORS_TENSOR} is not a short float32 vector; convert it again")
        factors = read_tensor(self._source, info, torch.float32).tolist()
        if not all(0 < factor < float("inf") for factor in factors):
            raise refusal(
                self.path, f"{FACTORS_TENSOR} holds divisors that are not finite and above 0; convert it again"
            )
        config["rope_scaling"] = scaling_of_factors(factors, config["rope_theta"])
