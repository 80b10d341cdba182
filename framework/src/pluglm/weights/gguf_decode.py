"""Turns the bytes of one GGUF tensor into a torch tensor, block by block. Knows types and layouts, not names.

Shape letters: R rows, C columns, E all elements flattened.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.gguf_header import TensorInfo, quant_block

_BLOCK_ELEMENTS = 1 << 18  # stays in the cache, and is a multiple of every quantisation block
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(source: ByteSource, info: TensorInfo, dtype: torch.dtype, *, added: float = 0.0) -> torch.Tensor:
    """The tensor in `dtype`, `added` subtracted (in float32) from each element.

    Beside the result only one block (2^18 elements in float32 and its bytes) is held at any time.
    """
    out = torch.empty(info.shape, dtype=dtype)
    out_E = out.view(-1)
    for start in range(0, out_E.numel(), _BLOCK_ELEMENTS):
        stop = min(start + _BLOCK_ELEMENTS, out_E.numel())
        block_E = _read_block(source, info, start, stop)
        out_E[start:stop].copy_(block_E.float() - added if added else block_E)
    return out


def read_permuted(source: ByteSource, info: TensorInfo, dtype: torch.dtype, num_heads: int) -> torch.Tensor:
    """As `read_tensor`, rows moved from ggml's interleaved rotary order to the half-split order of Hugging Face.

    Row 2i + j of a head (j = 0, 1) becomes row i + j * head_rows / 2. The rows must divide into 2 * num_heads.
    """
    num_rows = info.shape[0]
    columns = math.prod(info.shape[1:])
    out_RC = torch.empty((num_rows, columns), dtype=dtype)
    target_R = torch.arange(num_rows).view(num_heads, 2, -1).transpose(1, 2).reshape(-1)
    step = max(1, _BLOCK_ELEMENTS // columns) if len(info.shape) > 1 else num_rows
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        block_E = _read_block(source, info, start * columns, stop * columns)
        out_RC[target_R[start:stop]] = block_E.view(-1, columns).to(dtype)
    return out_RC.view(info.shape)


def block_bytes(info: TensorInfo) -> int:
    """What reading holds beside the result: a block of elements as stored, their codes and values in float32."""
    block, stored = quant_block(info.kind)
    count = min(_BLOCK_ELEMENTS, math.prod(info.shape))
    return count // block * stored + 2 * 4 * count


def _read_block(source: ByteSource, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    block, block_bytes = quant_block(info.kind)
    raw = source.read(info.begin + start // block * block_bytes, (stop - start) // block * block_bytes)
    if info.kind in _PLAIN:
        return torch.frombuffer(raw, dtype=_PLAIN[info.kind])
    # One long row: the gguf package loops in Python over groups of 16 rows, which is 25 times slower for real rows.
    row = np.frombuffer(raw, dtype=np.uint8).reshape(1, -1)
    with np.errstate(all="ignore"):
        values = dequantize(row, GGMLQuantizationType[info.kind])
    return torch.from_numpy(values.reshape(-1))
