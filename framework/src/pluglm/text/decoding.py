"""Streaming forms of the decoders found in tokenizer files: token strings in, text out, state kept between calls.

Each stage gives, over any split of its input, the same text as the tokenizers library gives for the whole input.
A decoder that cannot be streamed exactly is refused, never approximated.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from pluglm.kernel.errors import TokenizerError
from pluglm.text.byte_alphabet import byte_of_character, spelled_bytes

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
STREAMABLE = (
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Metaspace",
    "Replace (string pattern)",
    "Strip (left)",
    "Sequence of these",
)


class Stage(Protocol):
    """One step of a decoder. `push` takes the next piece and returns the pieces that are now certain, in order."""

    def push(self, piece: str) -> list[str]: ...

    def flush(self) -> list[str]:
        """The pieces still held at the end of the input; the stage is then as new."""
        ...


class SpelledBytes(dict[str, tuple[bytes, str | None]]):
    """What each piece of one vocabulary spells, and the text if that is UTF-8 by itself. Worked out when first asked
    for, and shared by streams."""

    def __init__(self) -> None:
        self._table = byte_of_character()

    def __missing__(self, piece: str) -> tuple[bytes, str | None]:
        data = spelled_bytes(piece, self._table)
        text: str | None = None
        with suppress(UnicodeDecodeError):
            text = data.decode()
        self[piece] = data, text
        return data, text


class ByteLevelStage:
    """Pieces spell bytes; text leaves when its UTF-8 sequence is complete, U+FFFD for what can never be completed."""

    def __init__(self, spelled: SpelledBytes) -> None:
        self._spelled = spelled
        self._held = b""  # the first bytes of a character

    def push(self, piece: str) -> list[str]:
        data, text = self._spelled[piece]
        if text is None or self._held:
            data = self._held + data
            text, num_decoded = codecs.utf_8_decode(data, "replace", False)
            self._held = data[num_decoded:]
        return [text]

    def flush(self) -> list[str]:
        held, self._held = self._held, b""
        return [held.decode(errors="replace")]


class ByteFallbackStage:
    """Runs of `<0xAB>` pieces become text as one run: all of it when it is UTF-8, else one U+FFFD for each byte.

    The run is held until it ends, because one bad byte later turns the whole run into U+FFFD.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> list[str]:
        match = BYTE_TOKEN.fullmatch(piece)
        if match is None:
            return [*self.flush(), piece]
        self._run.append(int(match[1], 16))
        return []

    def flush(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return []
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class MapStage:
    """Each piece on its own through one function; `first` is used for the first piece of the stream instead."""

    def __init__(self, other: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        self._other = other
        self._first = first or other
        self._next = self._first

    def push(self, piece: str) -> list[str]:
        mapped = self._next(piece)
        self._next = self._other
        return [mapped]

    def flush(self) -> list[str]:
        self._next = self._first
        return []


class StripLeftStage:
    """Drops up to `count` leading `content` characters of the joined text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count, self._left = content, count, count

    def push(self, piece: str) -> list[str]:
        start = 0
        while self._left and start < len(piece):
            if piece[start] != self._content:
                self._left = 0
                break
            start, self._left = start + 1, self._left - 1
        return [piece[start:]]

    def flush(self) -> list[str]:
        self._left = self._count
        return []


class StageChain:
    """Stages one after the other; itself a stage."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def push(self, piece: str) -> list[str]:
        return self._through([piece], 0)

    def flush(self) -> list[str]:
        text: list[str] = []
        for index, stage in enumerate(self._stages):
            text.extend(self._through(stage.flush(), index + 1))
        return text

    def _through(self, pieces: list[str], start: int) -> list[str]:
        for stage in self._stages[start:]:
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return pieces


def streaming_decoder(spec: Mapping[str, Any] | None, source: str, spelled: SpelledBytes) -> Stage:
    """The streaming form of the `decoder` entry of a tokenizers JSON; `source` names the tokenizer in messages.

    Raises TokenizerError for a decoder outside STREAMABLE (WordPiece, CTC, regex replacement, right strip).
    """
    stages: list[Stage] = []
    joined = False
    for part in _parts(spec, source):
        kind = part["type"]
        if kind == "Fuse":
            joined = True
            continue
        stages.append(_stage(part, joined, source, spelled))
        joined = joined or kind == "ByteLevel"
    return stages[0] if len(stages) == 1 else StageChain(stages)


def _parts(spec: Mapping[str, Any] | None, source: str) -> list[Mapping[str, Any]]:
    if spec is None:
        raise _not_streamable("a missing decoder (tokens joined by spaces)", source)
    if spec["type"] == "Sequence":
        return [part for inner in spec["decoders"] for part in _parts(inner, source)]
    return [spec]


def _stage(part: Mapping[str, Any], joined: bool, source: str, spelled: SpelledBytes) -> Stage:
    kind = part["type"]
    if kind == "ByteLevel" and not joined:
        return ByteLevelStage(spelled)
    if kind == "ByteFallback" and not joined:
        return ByteFallbackStage()
    if kind == "Metaspace" and not joined:
        return _metaspace(part)
    if kind == "Replace":
        return _replace(part, joined, source)
    if kind == "Strip" and joined and not part["stop"]:
        return StripLeftStage(part["content"], part["start"])
    raise _not_streamable(f"{kind!r} at this place in its decoder", source)


def _metaspace(part: Mapping[str, Any]) -> Stage:
    mark = part["replacement"]
    first_mark = " " if part.get("prepend_scheme", "always") == "never" else ""
    return MapStage(lambda piece: piece.replace(mark, " "), lambda piece: piece.replace(mark, first_mark))


def _replace(part: Mapping[str, Any], joined: bool, source: str) -> Stage:
    pattern, content = part["pattern"].get("String"), part["content"]
    if not pattern or (joined and len(pattern) > 1):
        raise _not_streamable("a replacement that can span tokens", source)
    return MapStage(lambda piece: piece.replace(pattern, content))


def _not_streamable(what: str, source: str) -> TokenizerError:
    return TokenizerError(
        f"{source}: the tokenizer has {what}, which cannot be streamed; streamable are {', '.join(STREAMABLE)}"
    )
