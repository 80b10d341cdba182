"""Namespaces of stored KV: a digest of everything but the tokens that keys and values depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

FORMAT = 1  # of the digest; a change makes every older namespace another one


def namespace(fields: Mapping[str, str | int | bytes]) -> bytes:
    """32 bytes of BLAKE2b (RFC 7693) over the fields in canonical form: sorted, tagged by name and type, with lengths.

    Two different mappings never encode to the same bytes, so no value can pass for another field's.
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, value in sorted({**fields, "format": FORMAT}.items()):
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        for part in (name.encode(), type(value).__name__.encode(), data):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
