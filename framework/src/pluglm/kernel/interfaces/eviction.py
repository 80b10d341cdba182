"""The contract of eviction: which cached block a KV manager gives up first. A small seam of prefix-caching managers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pluglm.kernel.interfaces.component import Component

EVICTION_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """A cached block that no sequence holds. Times count the manager's operations, not seconds.

    num_hits: how often a sequence adopted it. num_before: tokens of the prefix that lie before its own.
    """

    block: int
    num_hits: int
    num_before: int
    cached_at: int
    used_at: int  # last published or adopted
    idle_since: int  # last release by the last sequence that held it


class Eviction(Component, Protocol):
    """A preference only: the manager never evicts a block that is held, or one that another cached block follows."""

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        """The lowest goes first; ties by block number. A function of `block` alone, asked again when that changes."""
        ...
