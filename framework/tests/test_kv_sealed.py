"""Files of tensors with checksums: whole they come back bit for bit, damaged in any way they are refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from pluglm.kv.sealed import SealedFile, UnreadableFileError, read_bounded, seal, write_whole

KIND = "test 1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def tensors(dtype: torch.dtype = torch.float32, num_tokens: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens, 2, 4)
    return {
        "keys.0": torch.randint(-9, 9, shape, generator=generator).to(dtype),
        "values.0": torch.randint(-9, 9, (num_tokens, 1, 2), generator=generator).to(dtype),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in wanted.items()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_what_is_written_is_read(dtype: torch.dtype, num_tokens: int) -> None:
    written, document = tensors(dtype, num_tokens), {"ids": [1, 2], "name": 'é "quoted"', "none": None}
    file = SealedFile(KIND, seal(KIND, document, written))
    assert file.document == document
    assert same(file.tensors(), written)


def test_it_is_a_plain_safetensors_file() -> None:
    """By the format's own library."""
    assert same(load(seal(KIND, {}, tensors())), tensors())


def test_a_view_is_written_as_what_it_shows() -> None:
    whole = torch.arange(24.0).view(4, 2, 3)
    file = SealedFile(KIND, seal(KIND, {}, {"keys.0": whole[1:3].transpose(1, 2)}))
    assert torch.equal(file.tensors()["keys.0"], whole[1:3].transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_flipped_byte_goes_unnoticed(dtype: torch.dtype) -> None:
    """Every byte of the file, with a random change each."""
    written, generator = tensors(dtype), random.Random(str(dtype))
    data = seal(KIND, {"ids": [5, 6, 7]}, written)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= generator.randrange(1, 256)
        try:
            file = SealedFile(KIND, bytes(damaged))
            assert file.document == {"ids": [5, 6, 7]}
            assert same(file.tensors(), written)
        except UnreadableFileError:
            pass


def test_no_cut_goes_unnoticed() -> None:
    data = seal(KIND, {"ids": [5, 6, 7]}, tensors())
    for length in range(len(data)):
        with pytest.raises(UnreadableFileError):
            SealedFile(KIND, data[:length]).tensors()
    with pytest.raises(UnreadableFileError):
        SealedFile(KIND, data + b"\0").tensors()


@given(data=st.binary(max_size=200), claims_length=st.booleans())
@settings(derandomize=True, max_examples=300)
def test_random_bytes_are_refused(data: bytes, claims_length: bool) -> None:
    if claims_length:
        data = len(data).to_bytes(8, "little") + data
    with pytest.raises(UnreadableFileError):
        SealedFile(KIND, data)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"contents": "{}"}, {"contents": "{}", "checksum": "0"}, {"contents": "[" * 9999}], ids=str
)
def test_other_safetensors_files_are_refused(metadata: dict[str, str] | None) -> None:
    with pytest.raises(UnreadableFileError):
        SealedFile(KIND, save(tensors(), metadata))


def test_another_kind_is_named() -> None:
    with pytest.raises(UnreadableFileError, match="holds 'test 2', and 'test 1' is read here"):
        SealedFile(KIND, seal("test 2", {}, tensors()))


@pytest.mark.parametrize(
    "scalar", [torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 0, 3)], ids=["0-d", "empty", "flat"]
)
def test_tensors_of_another_file_are_refused(scalar: torch.Tensor) -> None:
    """The sealed contents of one file on the tensors of another."""
    own = seal(KIND, {}, {"keys.0": torch.ones(1, 1, 1)})
    length = int.from_bytes(own[:8], "little")
    metadata = json.loads(own[8 : 8 + length])["__metadata__"]
    with pytest.raises(UnreadableFileError, match=r"tensor 'keys\.0'"):
        SealedFile(KIND, save({"keys.0": scalar}, metadata)).tensors()


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "ten").write_bytes(b"0123456789")
    assert read_bounded(tmp_path / "ten", 10) == b"0123456789"
    with pytest.raises(UnreadableFileError, match="larger than 9 bytes"):
        read_bounded(tmp_path / "ten", 9)


@pytest.mark.parametrize("name", ["gone", ".", "a\0b"], ids=["missing", "folder", "nul"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableFileError, match=r"cannot be read|is no file"):
        read_bounded(tmp_path / name, 10)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFileError, match="is no file"):
        read_bounded(tmp_path / "pipe", 10)


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "kv"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"new")
    assert [one.name for one in path.parent.iterdir()] == ["kv"]
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o077 == 0, "others may read what the prompt was"
