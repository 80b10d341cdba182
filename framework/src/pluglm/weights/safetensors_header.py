"""Checks the header of one safetensors file before anything is read from it. Knows the format, not the library.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.messages import damaged, quoted, refusal

_LARGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 16
_LARGEST_DIMENSION = 1 << 62
ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. dtype: the format's name of it; begin, end: bytes in the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the file by name, every claim of the header checked against the file's real size.

    Raises CheckpointError with one line for the first lie: a length past the file or past 100 MB, invalid JSON,
    a name twice, an unknown dtype, an impossible shape, ranges that overlap, leave gaps or do not match the shape.
    """
    with ByteSource(path) as source:
        if source.size < 8:
            raise damaged(path, f"is {source.size} bytes long and a safetensors file starts with 8 bytes of length")
        length = int.from_bytes(source.read(0, 8), "little")
        if length > _LARGEST_HEADER:
            raise damaged(path, f"its header claims {length} bytes, more than the {_LARGEST_HEADER} allowed")
        if length > source.size - 8:
            raise damaged(path, f"its header claims {length} bytes and only {source.size - 8} follow")
        header = _parse(path, bytes(source.read(8, length)))
        entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
        _check_ranges(path, entries, source.size - 8 - length)
    return entries


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise damaged(path, f"its header names {quoted(name)} twice")
            found[name] = value
        return found

    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict) or not content.startswith(b"{"):
        raise damaged(path, "its header is not a JSON object")
    notes = header.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise damaged(path, "its __metadata__ is not a table of texts")
    return header


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"tensor {quoted(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        known = ", ".join(ITEM_SIZES)
        raise refusal(path, f"tensor {quoted(name)} has the unknown dtype {quoted(dtype)}; known are {known}")
    if not _naturals(shape, _LARGEST_DIMENSION) or len(shape) > _MOST_DIMENSIONS:
        raise damaged(path, f"tensor {quoted(name)} has the impossible shape {quoted(shape)}")
    if not _naturals(offsets, _LARGEST_DIMENSION) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(path, f"tensor {quoted(name)} has the impossible data_offsets {quoted(offsets)}")
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if needed != offsets[1] - offsets[0]:
        claim = f"{dtype} {quoted(shape)} needs {needed} bytes and has {offsets[1] - offsets[0]}"
        raise damaged(path, f"tensor {quoted(name)}: {claim}")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(values: Any, largest: int) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value <= largest for value in values)


def _check_ranges(path: Path, entries: dict[str, TensorEntry], data_size: int) -> None:
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            what = "overlaps the tensor before it" if entry.begin < reached else "leaves a gap before it"
            raise damaged(path, f"tensor {quoted(name)} starts at data byte {entry.begin} and {what} ({reached})")
        reached = entry.end
    if reached != data_size:
        raise damaged(path, f"its tensors need {reached} bytes of data and {data_size} are there")
