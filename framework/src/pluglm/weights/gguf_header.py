"""Checks and indexes the header of a GGUF file. Knows the format, not what keys or tensors mean.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The index keeps where each value lies and decodes none: GGUFReader of the gguf package makes an array object of
every token (seconds and hundreds of megabytes for 262,144 tokens) and trusts lengths, so it serves the tests instead.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.messages import damaged, quoted, refusal

MAGIC = b"GGUF"
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
READABLE_TYPES = frozenset(
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 1 << 20
_LONGEST_NAME = 65_535
_MOST_DIMENSIONS = 4
_LEAST_FIELD, _LEAST_TENSOR = 13, 32


@dataclass(frozen=True, slots=True)
class Field:
    """Where one metadata value lies. kind: its GGUF value type; item_kind, count: of an array, else -1 and 1."""

    kind: int
    item_kind: int
    count: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its ggml type by name, shape rows first, and the absolute byte range of its data."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Where everything in the file lies: metadata fields and tensors by their names in the file."""

    fields: dict[str, Field]
    tensors: dict[str, TensorInfo]


def read_header(source: ByteSource) -> Header:
    """Index of the whole header; raises CheckpointError with one line for the first claim the file cannot hold."""
    if source.size < 24:
        raise damaged(source.path, f"is {source.size} bytes long and a GGUF header has at least 24")
    with mmap.mmap(source.fileno(), source.size, access=mmap.ACCESS_READ) as data:
        return _Reader(source, data).header()


class _Reader:
    """A cursor over the mapped file; each step checks that what it takes is there."""

    def __init__(self, source: ByteSource, data: mmap.mmap) -> None:
        self.path = source.path
        self.size = source.size
        self.data = data
        self.position = 0

    def header(self) -> Header:
        self.check_magic()
        num_tensors, num_fields = self.u64("the tensor count"), self.u64("the metadata count")
        self.check_count(num_fields, _LEAST_FIELD, "metadata entries")
        self.check_count(num_tensors, _LEAST_TENSOR, "tensors")
        fields: dict[str, Field] = {}
        for _ in range(num_fields):
            key = self.text("a metadata key")
            if key in fields:
                raise damaged(self.path, f"metadata key {quoted(key)} appears twice")
            fields[key] = self.field(key)
        alignment = self.alignment(fields)
        claims: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self.text("a tensor name")
            if name in claims:
                raise damaged(self.path, f"tensor {quoted(name)} appears twice")
            claims[name] = self.claim(name)
        start = -(-self.position // alignment) * alignment
        return Header(fields, self.place(claims, start, alignment))

    def check_magic(self) -> None:
        if self.take(4, "the magic") != MAGIC:
            raise refusal(self.path, "is not a GGUF file (it does not start with GGUF)")
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            raise refusal(self.path, "is a big-endian GGUF file; only little-endian ones are read, so convert it anew")
        if version not in _VERSIONS:
            raise refusal(self.path, f"has GGUF version {version}; versions 2 and 3 are read, so convert it anew")

    def take(self, length: int, what: str) -> bytes:
        self.skip(length, what)
        return self.data[self.position - length : self.position]

    def skip(self, length: int, what: str) -> None:
        if length > self.size - self.position:
            raise damaged(self.path, f"{what} at byte {self.position} claims {length} bytes and the file ends before")
        self.position += length

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def check_count(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self.position:
            raise damaged(self.path, f"claims {count} {what}, more than the rest of the file can hold")

    def text(self, what: str) -> str:
        length = self.u64(what)
        if length > _LONGEST_NAME:
            raise damaged(self.path, f"{what} at byte {self.position} claims {length} bytes")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"{what} {quoted(raw)} is not UTF-8") from error

    def field(self, key: str) -> Field:
        what = f"metadata {quoted(key)}"
        kind, item_kind, count = self.u32(what), -1, 1
        if kind == ARRAY:
            item_kind, count = self.u32(what), self.u64(what)
        begin = self.position
        self.skip_values(kind if kind != ARRAY else item_kind, count, what)
        return Field(kind, item_kind, count, begin, self.position)

    def skip_values(self, kind: int, count: int, what: str) -> None:
        if kind in SCALARS:
            self.skip(struct.calcsize(f"<{SCALARS[kind]}") * count, what)
        elif kind == STRING:
            self.check_count(count, 8, f"texts in {what}")
            self.skip_texts(count, what)
        elif kind == ARRAY:
            raise refusal(self.path, f"{what} is an array of arrays, which no known model uses")
        else:
            raise damaged(self.path, f"{what} has the unknown value type {kind}")

    def skip_texts(self, count: int, what: str) -> None:
        unpack, data, last, position = struct.Struct("<Q").unpack_from, self.data, self.size - 8, self.position
        for _ in range(count):
            if position > last:
                raise damaged(self.path, f"{what} runs past the end of the file")
            position += 8 + unpack(data, position)[0]
        if position > self.size:
            raise damaged(self.path, f"{what} runs past the end of the file")
        self.position = position

    def alignment(self, fields: dict[str, Field]) -> int:
        field = fields.get("general.alignment")
        if field is None:
            return _DEFAULT_ALIGNMENT
        value = int.from_bytes(self.data[field.begin : field.end], "little") if field.kind == 4 else 0
        if not 0 < value <= _LARGEST_ALIGNMENT or value & (value - 1):
            raise damaged(self.path, "general.alignment is not a 32-bit power of two up to 1048576")
        return value

    def claim(self, name: str) -> tuple[str, tuple[int, ...], int]:
        what = f"tensor {quoted(name)}"
        num_dimensions = self.u32(what)
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise damaged(self.path, f"{what} claims {num_dimensions} dimensions, 1 to {_MOST_DIMENSIONS} are allowed")
        columns_first = [self.u64(what) for _ in range(num_dimensions)]
        number, offset = self.u32(what), self.u64(what)
        try:
            kind = GGMLQuantizationType(number).name
        except ValueError as error:
            raise damaged(self.path, f"{what} has the unknown type number {number}") from error
        if kind not in READABLE_TYPES:
            readable = ", ".join(sorted(READABLE_TYPES))
            raise refusal(
                self.path, f"{what} is of type {kind}, which is not read; take a file that uses only {readable}"
            )
        return str(kind), tuple(reversed(columns_first)), offset

    def place(
        self, claims: dict[str, tuple[str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors = {}
        for name, (kind, shape, offset) in claims.items():
            what = f"tensor {quoted(name)}"
            if offset % alignment:
                raise damaged(self.path, f"{what} lies at offset {offset}, not a multiple of {alignment}")
            begin = start + offset
            end = begin + self.data_bytes(what, kind, shape)
            if end > self.size:
                raise damaged(self.path, f"{what} ends at byte {end} and the file has {self.size}")
            tensors[name] = TensorInfo(kind, shape, begin, end)
        reached = 0
        for name, info in sorted(tensors.items(), key=lambda item: item[1].begin):
            if info.begin < reached:
                raise damaged(self.path, f"tensor {quoted(name)} overlaps the one before it")
            reached = info.end
        return tensors

    def data_bytes(self, what: str, kind: str, shape: tuple[int, ...]) -> int:
        block, block_bytes = quant_block(kind)
        num_elements = math.prod(shape)
        if num_elements == 0 or num_elements >= 1 << 62 or shape[-1] % block:
            raise damaged(self.path, f"{what} has the shape {list(shape)}, which {kind} cannot have")
        return num_elements // block * block_bytes


def quant_block(kind: str) -> tuple[int, int]:
    """Elements and bytes of one block of a ggml type."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(block), int(block_bytes)
