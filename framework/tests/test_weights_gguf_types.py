"""Every GGUF tensor type: what `tensor()` gives equals the gguf package's own dequantisation, in each dtype."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.gguf_header import READABLE_TYPES

# Byte positions of the float16 scales in one block (ggml-common.h); the gguf package quantises no K types.
K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def encode(kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of `kind`: quantised normal numbers, or for K types random bytes with scales near 0.01."""
    rng = np.random.default_rng([rows, columns, len(kind)])
    qtype = GGMLQuantizationType[kind]
    if kind not in K_SCALES:
        return gguf.quants.quantize(rng.standard_normal((rows, columns), dtype=np.float32), qtype)
    block, size = GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for at in K_SCALES[kind]:
        scales = rng.uniform(0.005, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write(path: Path, kind: str, data: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "unheard-of")
    writer.add_tensor("some.weight", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", sorted(READABLE_TYPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_gguf_package(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    data = encode(kind, 48, 512)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(data, GGMLQuantizationType[kind]), dtype=np.float32))
    checkpoint = GGUFCheckpoint(write(tmp_path / "one.gguf", kind, data))
    got = checkpoint.tensor("some.weight", dtype)
    checkpoint.close()
    assert expected.abs().max() > 0
    assert got.is_contiguous()
    assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q6_K"])
def test_a_tensor_of_several_read_blocks_is_whole(tmp_path: Path, kind: str) -> None:
    data = encode(kind, 1100, 512)  # 563,200 elements: more than two blocks of 2^18
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(data, GGMLQuantizationType[kind]), dtype=np.float32))
    checkpoint = GGUFCheckpoint(write(tmp_path / "big.gguf", kind, data))
    assert torch.equal(checkpoint.tensor("some.weight", torch.float32), expected)
    checkpoint.close()


def test_results_stay_valid_after_close_and_reading_does_not(tmp_path: Path) -> None:
    data = encode("Q4_0", 4, 64)
    checkpoint = GGUFCheckpoint(write(tmp_path / "one.gguf", "Q4_0", data))
    got = checkpoint.tensor("some.weight", torch.float32)
    checkpoint.close()
    expected = gguf.quants.dequantize(data, GGMLQuantizationType.Q4_0)
    assert np.array_equal(got.numpy(), expected)
    with pytest.raises(CheckpointError, match=r"one\.gguf: cannot be read"):
        checkpoint.tensor("some.weight", torch.float32)


@pytest.mark.parametrize("kind", ["IQ4_XS", "TQ2_0", "MXFP4", "Q8_K"])
def test_other_quantised_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    path = write(tmp_path / "odd.gguf", kind, np.zeros((2, 512 // block * size), np.uint8))
    with pytest.raises(CheckpointError, match=f"odd.gguf: tensor 'some.weight' is of type {kind}"):
        GGUFCheckpoint(path)


def test_integer_dtypes_are_a_programming_error(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write(tmp_path / "one.gguf", "F32", encode("F32", 2, 32)))
    with pytest.raises(ValueError, match=r"not torch\.int8"):
        checkpoint.tensor("some.weight", torch.int8)
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        checkpoint.tensor("other", torch.float32)
    assert checkpoint.shape("other") is None
    assert checkpoint.shape("some.weight") == (2, 32)
    checkpoint.close()
