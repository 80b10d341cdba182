"""The printable alphabet in which byte-level vocabularies spell the 256 bytes. Knows nothing of any tokenizer.

Source: GPT-2's published encoder; the same table stands behind the ByteLevel parts of the tokenizers library.
"""

from __future__ import annotations

PRINTABLE_BYTES = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def byte_of_character() -> dict[str, int]:
    """Maps each of the 256 characters to its byte: printable bytes stand for themselves, the rest from U+0100 on."""
    hidden = [byte for byte in range(256) if byte not in PRINTABLE_BYTES]
    table = {chr(byte): byte for byte in PRINTABLE_BYTES}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(hidden)})
    return table


def spelled_bytes(token: str, table: dict[str, int]) -> bytes:
    """The bytes that `token` spells; a token with any character outside the alphabet is plain UTF-8 text."""
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
