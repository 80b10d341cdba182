"""Finds whole blocks by a hash chained from the start of the sequence. Knows no table and no eviction.

The chain is that of vLLM's prefix caching on PagedAttention (arXiv:2309.06180); the hash is BLAKE2b (RFC 7693), keyed
with a secret of this index alone, so that nobody can look for prompts whose keys collide.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Collection, Container
from itertools import chain

from pluglm.kernel.core import CacheKey
from pluglm.kv.prefix_index import CacheEntry

Digest = Callable[[bytes], bytes]


def field(tag: bytes, data: bytes) -> bytes:
    """A tag of one byte, the length in 8 bytes, the data: joined fields can be taken apart in one way only."""
    return tag + len(data).to_bytes(8, "little") + data


VERSION = field(b"V", b"pluglm block key 1")


def block_fields(namespace: bytes | None, parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    """What a block's key is the hash of: version, namespace (of a first block) or else the parent's key, tokens."""
    origin = field(b"P", parent_key) if namespace is None else field(b"N", namespace)
    return VERSION + origin + field(b"T", struct.pack(f"<{len(tokens)}q", *tokens))


def keyed_digest(secret: bytes) -> Digest:
    """data -> all 64 bytes of its BLAKE2b under this key."""
    start = hashlib.blake2b(key=secret)

    def digest(data: bytes) -> bytes:
        state = start.copy()
        state.update(data)
        return state.digest()

    return digest


class HashIndex:
    """A PrefixIndex of whole blocks. digest: None is a keyed BLAKE2b with a secret drawn now."""

    def __init__(self, block_size: int, digest: Digest | None = None) -> None:
        self._block_size = block_size
        self._digest = digest or keyed_digest(secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE))
        self._entries: dict[bytes, list[CacheEntry]] = {}

    def match(self, key: CacheKey, without: Container[int]) -> tuple[list[CacheEntry], int]:
        size, found = self._block_size, list[CacheEntry]()
        for end in range(size, min(key.limit, len(key.token_ids)) + 1, size):
            tokens = tuple(key.token_ids[end - size : end])
            entry = self.find(key.namespace, found[-1] if found else None, tokens)
            if entry is None or entry.block in without:
                break
            found.append(entry)
        return found, len(found) * size

    def find(self, namespace: bytes, parent: CacheEntry | None, tokens: tuple[int, ...]) -> CacheEntry | None:
        """Compares the tokens too, so a collision is a miss."""
        for entry in self._entries.get(self._key(namespace, parent, tokens), ()):
            if entry.parent is parent and entry.place[1] == (namespace, tokens):
                return entry
        return None

    def add(self, namespace: bytes, parent: CacheEntry | None, tokens: tuple[int, ...], entry: CacheEntry) -> None:
        key = self._key(namespace, parent, tokens)
        entry.place = key, (namespace, tokens)
        self._entries.setdefault(key, []).append(entry)

    def remove(self, entry: CacheEntry) -> None:
        key = entry.place[0]
        self._entries[key].remove(entry)
        if not self._entries[key]:
            del self._entries[key]

    def path(self, entry: CacheEntry) -> tuple[bytes, tuple[int, ...]]:
        runs: list[tuple[int, ...]] = []
        at: CacheEntry | None = entry
        while at is not None:
            runs.append(at.place[1][1])
            at = at.parent
        return entry.place[1][0], tuple(chain.from_iterable(reversed(runs)))

    def audit(self, entries: Collection[CacheEntry]) -> None:
        found = [entry for bucket in self._entries.values() for entry in bucket]
        if len(found) != len(entries) or set(found) != set(entries):
            raise RuntimeError(f"KV cache: the index finds {len(found)} blocks, {len(entries)} are cached")
        for entry in entries:
            if self.find(entry.place[1][0], entry.parent, entry.place[1][1]) is not entry:
                raise RuntimeError(f"KV cache: the index does not find block {entry.block} by its content")

    def _key(self, namespace: bytes, parent: CacheEntry | None, tokens: tuple[int, ...]) -> bytes:
        if parent is None:
            return self._digest(block_fields(namespace, b"", tokens))
        return self._digest(block_fields(None, parent.place[0], tokens))
