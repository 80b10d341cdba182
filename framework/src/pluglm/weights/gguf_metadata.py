"""The metadata of a GGUF file as a read-only mapping, decoded when asked. Knows value types, not keys."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from pluglm.weights.byte_source import ByteSource
from pluglm.weights.gguf_header import ARRAY, BOOL, SCALARS, STRING, Field
from pluglm.weights.messages import damaged, quoted


class GGUFMetadata(Mapping[str, Any]):
    """Key -> int, float, bool, str, or a list of those.

    A value is read from the file and decoded at each access, and not kept: a caller that needs a token list twice
    keeps it. Raises CheckpointError when a text is not UTF-8 or the checkpoint was closed.
    """

    def __init__(self, source: ByteSource, fields: Mapping[str, Field]) -> None:
        self._source = source
        self._fields = fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        raw = self._source.read(field.begin, field.end - field.begin)
        kind = field.item_kind if field.kind == ARRAY else field.kind
        try:
            values = _texts(raw, field.count) if kind == STRING else _scalars(raw, kind, field.count)
        except (UnicodeDecodeError, struct.error) as error:
            raise damaged(self._source.path, f"metadata {quoted(key)} cannot be decoded ({error})") from error
        return values if field.kind == ARRAY else values[0]


def _scalars(raw: bytearray, kind: int, count: int) -> list[Any]:
    if kind == BOOL:
        return [byte != 0 for byte in raw]
    return list(struct.unpack(f"<{count}{SCALARS[kind]}", raw))


def _texts(raw: bytearray, count: int) -> list[str]:
    unpack, texts, position = struct.Struct("<Q").unpack_from, [], 0
    for _ in range(count):
        begin = position + 8
        position = begin + unpack(raw, position)[0]
        texts.append(raw[begin:position].decode("utf-8"))
    return texts
