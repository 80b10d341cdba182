"""Safetensors model folders: round trips through files that the safetensors package wrote, shards, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.safetensors import SafetensorsCheckpoint

INDEX = "model.safetensors.index.json"
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (5, 7), "b.weight": (4,), "c.weight": (2, 3, 4), "scalar": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 7}')
    return tmp_path


def shard(folder: Path) -> None:
    """Two shards and their index."""
    everything = tensors()
    parts = {"one.safetensors": ["a.weight", "b.weight"], "two.safetensors": ["c.weight", "scalar"]}
    for file, names in parts.items():
        save_file({name: everything[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("wanted", FLOATS, ids=str)
def test_round_trip_in_every_dtype(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    expected = tensors(stored)
    save_file(expected, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.names() == expected.keys()
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 7}
    assert checkpoint.generation_config == {}
    assert checkpoint.folder == folder
    for name, data in expected.items():
        got = checkpoint.tensor(name, wanted)
        assert checkpoint.shape(name) == tuple(data.shape)
        assert got.dtype == wanted
        assert got.is_contiguous()
        assert torch.equal(got, data.to(wanted))


def test_shards_are_one_checkpoint(folder: Path) -> None:
    shard(folder)
    checkpoint = SafetensorsCheckpoint(folder)
    for name, data in tensors().items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), data)
    assert checkpoint.names() == tensors().keys()


@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_the_only_file_may_have_any_name(folder: Path, as_file: bool) -> None:
    save_file(tensors(), folder / "weights.safetensors")
    checkpoint = SafetensorsCheckpoint(folder / "weights.safetensors" if as_file else folder)
    assert checkpoint.names() == tensors().keys()
    assert checkpoint.folder == folder
    assert checkpoint.config["model_type"] == "llama"


def test_the_result_belongs_to_the_caller(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = SafetensorsCheckpoint(folder)
    got = checkpoint.tensor("a.weight", torch.float32)
    got.zero_()
    assert torch.equal(checkpoint.tensor("a.weight", torch.float32), tensors()["a.weight"])
    checkpoint.close()
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match=r"was closed before tensor 'a\.weight'"):
        checkpoint.tensor("a.weight", torch.float32)


def test_generation_config_is_read_and_code_is_not_run(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}}')
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert torch.equal(checkpoint.tensor("b.weight", torch.float32), tensors()["b.weight"])
    assert not (folder / "ran").exists()


def test_integer_tensors_are_listed_and_not_read(folder: Path) -> None:
    save_file({"ids": torch.arange(6).reshape(2, 3)}, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.shape("ids") == (2, 3)
    with pytest.raises(CheckpointError, match="tensor 'ids' is I64; only F64, F32, F16, BF16"):
        checkpoint.tensor("ids", torch.float32)
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        checkpoint.tensor("other", torch.float32)
    with pytest.raises(ValueError, match=r"not torch\.int64"):
        checkpoint.tensor("ids", torch.int64)


def test_a_file_replaced_after_opening_is_an_error(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    save_file({"a.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed after the file was opened"):
        checkpoint.tensor("a.weight", torch.float32)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.tensor("b.weight", torch.float32)


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def twice(folder: Path) -> None:
    save_file(
        {"c.weight": torch.ones(1), "a.weight": torch.ones(1), "scalar": torch.ones(1)}, folder / "two.safetensors"
    )


BROKEN_SHARDS = {
    "a name no file can have": (
        edit_index(lambda table: table.update(scalar=f"{'x' * 300}.safetensors")),
        "names the shard 'xxx",
    ),
    "missing shard": (lambda folder: (folder / "two.safetensors").unlink(), "lacks the shard 'two.safetensors'"),
    "no map": (lambda folder: (folder / INDEX).write_text("{}"), "has no table weight_map"),
    "map of numbers": (edit_index(lambda table: table.update(scalar=1)), "names the shard '1'"),
    "outside": (edit_index(lambda table: table.update(scalar="../x.safetensors")), "only *.safetensors of its own"),
    "absolute": (edit_index(lambda table: table.update(scalar="/x.safetensors")), "only *.safetensors of its own"),
    "drive": (edit_index(lambda table: table.update(scalar="C:x.safetensors")), "only *.safetensors of its own"),
    "pickle": (edit_index(lambda table: table.update(scalar="pytorch_model.bin")), "only *.safetensors of its own"),
    "not in its shard": (edit_index(lambda table: table.update(more="two.safetensors")), "lacks tensor 'more'"),
    "in the other shard": (edit_index(lambda table: table.update(scalar="one.safetensors")), "lacks tensor 'scalar'"),
    "in two shards": (twice, "tensor 'a.weight' is in two shards, one.safetensors and two.safetensors"),
    "not JSON": (lambda folder: (folder / INDEX).write_text("{"), "is not valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_broken_shards_are_named(folder: Path, case: str) -> None:
    damage, expected = BROKEN_SHARDS[case]
    shard(folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    assert expected in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "config.json: is missing"),
        (b"{", "config.json: is not valid JSON"),
        (b"[" * 100_000, "config.json: is not valid JSON"),
        (b"\xff\xfe{", "config.json: is not valid JSON"),
        (b"[]", "config.json: holds a JSON list where an object is needed"),
    ],
)
def test_bad_config(folder: Path, content: bytes | None, expected: str) -> None:
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "holds no weights"),
        (["pytorch_model.bin"], "is a pickle file, which can run code when it is read; convert the model"),
        (["model.pt"], "is a pickle file"),
        (["weights.pickle"], "is a pickle file"),
        (["a.safetensors", "b.safetensors"], "holds 2 safetensors files"),
    ],
)
def test_folders_without_readable_weights(folder: Path, files: list[str], expected: str) -> None:
    for file in files:
        (folder / file).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=expected):
        SafetensorsCheckpoint(folder)


def test_a_broken_link_is_no_absent_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to(folder / "gone")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is missing"):
        SafetensorsCheckpoint(folder)
