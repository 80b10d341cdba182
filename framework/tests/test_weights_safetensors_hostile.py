"""Damaged and lying safetensors files: always CheckpointError in one line before a byte of data is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.safetensors import SafetensorsCheckpoint

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "__metadata__": {"format": "pt"},
}
DATA = bytes(32)


def build(header: Any = GOOD, *, data: bytes = DATA, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def with_b(**changes: Any) -> bytes:
    return build(GOOD | {"b": GOOD["b"] | changes})


TWICE = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}}'
LIES = {
    "empty": (b"", "is 0 bytes long"),
    "only a length": (build(b"", data=b"", length=5), "claims 5 bytes and only 0 follow"),
    "length past the file": (build(length=1 << 20), "claims 1048576 bytes and only"),
    "length over 100 MB": (build(length=(1 << 64) - 1), "claims 18446744073709551615 bytes, more than the 100000000"),
    "length too short": (build(length=10), "not valid JSON"),
    "no header": (build(b""), "not valid JSON"),
    "not JSON": (build(b"{'a': 1}"), "not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (build(b'{"a":' * 50_000), "not valid JSON"),
    "list": (build(b"[]"), "not a JSON object"),
    "leading space": (build(b" {}", data=b""), "not a JSON object"),
    "name twice": (build(TWICE), "names 'a' twice"),
    "metadata of numbers": (build(GOOD | {"__metadata__": {"a": 1}}), "__metadata__ is not a table of texts"),
    "entry is a number": (build(GOOD | {"b": 3}), "tensor 'b' is not described"),
    "entry lacks offsets": (build(GOOD | {"b": {"dtype": "U8", "shape": [1]}}), "tensor 'b' is not described"),
    "name of two lines": (build(GOOD | {"b\nc": 3}), "tensor 'b\\nc' is not described"),
    "unknown dtype": (with_b(dtype="F13"), "tensor 'b' has the unknown dtype 'F13'"),
    "dtype list": (with_b(dtype=["F32"]), "has the unknown dtype"),
    "negative dimension": (with_b(shape=[-2, -2]), "has the impossible shape '[-2, -2]'"),
    "huge dimension": (with_b(shape=[1 << 63]), "has the impossible shape"),
    "fraction": (with_b(shape=[4.0]), "has the impossible shape"),
    "truth value": (with_b(shape=[True, 4]), "has the impossible shape"),
    "many dimensions": (with_b(shape=[4] + [1] * 100), "has the impossible shape"),
    "product wraps to 4": (with_b(shape=[4, (1 << 61) + 1, 8]), "needs"),
    "shape and size": (with_b(shape=[5]), "BF16 '[5]' needs 10 bytes and has 8"),
    "offsets reversed": (with_b(data_offsets=[32, 24]), "has the impossible data_offsets"),
    "offsets negative": (with_b(data_offsets=[-8, 0]), "has the impossible data_offsets"),
    "three offsets": (with_b(data_offsets=[24, 32, 32]), "has the impossible data_offsets"),
    "overlap": (with_b(data_offsets=[16, 24]), "starts at data byte 16 and overlaps"),
    "gap": (with_b(data_offsets=[26, 34]), "starts at data byte 26 and leaves a gap"),
    "data cut": (build(data=bytes(31)), "need 32 bytes of data and 31 are there"),
    "data left over": (build(data=bytes(33)), "need 32 bytes of data and 33 are there"),
    "pickle": (b"\x80\x04\x95" + bytes(40), "claims 9766016 bytes and only 35 follow"),
}


def refusal_of(folder: Path, content: bytes) -> str | None:
    """Open, and read everything that can be read."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    try:
        checkpoint = SafetensorsCheckpoint(folder)
        for name in sorted(checkpoint.names()):
            got = checkpoint.tensor(name, torch.float32)
            if tuple(got.shape) != checkpoint.shape(name):
                raise AssertionError(f"{name} has shape {got.shape}")
    except CheckpointError as error:
        return str(error)
    return None


def test_the_file_that_the_lies_are_made_from_is_good(tmp_path: Path) -> None:
    assert refusal_of(tmp_path, build()) is None
    assert refusal_of(tmp_path, build({}, data=b"")) is None


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_named_in_one_line(tmp_path: Path, lie: str) -> None:
    content, expected = LIES[lie]
    message = refusal_of(tmp_path, content)
    assert message is not None
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert expected in message
    assert "\n" not in message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = build()
    for length in range(len(content)):
        message = refusal_of(tmp_path, content[:length])
        assert message is not None, length
        assert "\n" not in message


MUTATIONS = st.lists(st.tuples(st.integers(0, len(build()) - 33), st.integers(0, 255)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(mutations=MUTATIONS, cut=st.one_of(st.none(), st.integers(0, len(build()))))
def test_random_damage_opens_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, mutations: list[tuple[int, int]], cut: int | None
) -> None:
    content = bytearray(build())
    for at, byte in mutations:
        content[at] = byte
    message = refusal_of(tmp_path_factory.getbasetemp(), bytes(content[:cut]))
    assert message is None or "\n" not in message


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(["dtype", "shape", "data_offsets"]), value=JSON_VALUES)
def test_any_json_in_an_entry_opens_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    message = refusal_of(tmp_path_factory.getbasetemp(), with_b(**{key: value}))
    assert message is None or "\n" not in message
