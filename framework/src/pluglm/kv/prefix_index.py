"""What a prefix cache knows of a block, and the seam by which it finds blocks by content. Knows no books."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any, Protocol

from pluglm.kernel.core import CacheKey


@dataclass(slots=True, eq=False, kw_only=True)
class CacheEntry:
    """A block whose content is known, held or not. Written by the cache alone, but for `place`.

    parent: the entry of the block before it, None for the first block of a sequence. num_tokens: known ones; fewer
    than a block has only where a sequence ended. num_followers: entries whose parent it is. rank: what its item in the
    eviction heap says, None without one. place: written and read by the index.
    """

    block: int
    parent: CacheEntry | None
    num_before: int
    num_tokens: int
    cached_at: int
    used_at: int
    idle_since: int
    num_hits: int = 0
    num_followers: int = 0
    rank: tuple[float, ...] | None = None
    place: Any = None


class PrefixIndex(Protocol):
    """Finds entries by content. `parent` None is the start of a namespace."""

    def match(self, key: CacheKey, without: Container[int]) -> tuple[list[CacheEntry], int]:
        """The entries of the longest known prefix of key.token_ids, key.limit tokens at most, in order, and its length.

        No entry whose block is in `without`. The last entry may know more tokens than the prefix has. Changes nothing.
        """
        ...

    def find(self, namespace: bytes, parent: CacheEntry | None, tokens: tuple[int, ...]) -> CacheEntry | None:
        """An entry after `parent` that begins with these tokens."""
        ...

    def add(
        self, namespace: bytes, parent: CacheEntry | None, tokens: tuple[int, ...], entry: CacheEntry
    ) -> CacheEntry | None:
        """Make `entry` findable; `find` had none. Returns one after `parent` that it makes useless, if any."""
        ...

    def remove(self, entry: CacheEntry) -> None:
        """Forget an entry that nothing follows."""
        ...

    def path(self, entry: CacheEntry) -> tuple[bytes, tuple[int, ...]]:
        """The namespace, and the tokens from the start of the sequence to the end of an entry that is not removed."""
        ...

    def audit(self, entries: Collection[CacheEntry]) -> None:
        """RuntimeError unless exactly these can be found. O(entries)."""
        ...
