"""The tiers of a run, called under the guard: one that raises or hangs is used no more. Counts what they do."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pluglm.kernel.cache_keys import namespace as digest_of
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.guard import Guard, Watched
from pluglm.kernel.interfaces.kv_tier import KVTier, Lease, LeaseState

logger = logging.getLogger("pluglm")
ResultT = TypeVar("ResultT")
FORMAT = "pluglm KV block 1"  # of what a key stands for


@dataclass(slots=True)
class TierCounts:
    """Blocks that one tier was asked to store or load, by what became of them. Written by the engine's tiers alone.

    num_slow: hits that were computed again, since that was faster. num_failed, num_late: of stores and loads.
    """

    num_stored: int = 0
    num_loaded: int = 0
    num_slow: int = 0
    num_failed: int = 0
    num_late: int = 0


@dataclass(frozen=True, slots=True)
class TierLease:
    """A lease and the name of its tier."""

    tier: str
    lease: Lease


class TierSet:
    """tiers: by name, in the order in which they are asked; shrinks when one fails. counts: of all there were."""

    def __init__(self, tiers: Mapping[str, KVTier], guard: Guard) -> None:
        self._guard = guard
        self.tiers: dict[str, KVTier] = {name: self._watched(name, tier) for name, tier in tiers.items()}
        self.counts = {name: TierCounts() for name in tiers}

    def _watched(self, name: str, target: Any) -> Any:
        return Watched(target, self._guard, _label(name))

    def ask(self, call: Callable[[], ResultT]) -> ResultT | None:
        """call() under the guard, or None when a tier fails in it, which is the end of that tier."""
        try:
            return self._guard.call("the kv tiers", call)
        except ComponentFailure as failure:
            failed = [name for name in self.tiers if _label(name) == failure.component] or list(self.tiers)
            logger.warning("%s; not used any more in this run: kv tier %s", failure, ", ".join(failed))
            logger.debug("it was raised here:", exc_info=failure.__cause__ or failure)
            for name in failed:
                del self.tiers[name]
            return None

    def for_each(self, call: Callable[[KVTier], None]) -> None:
        """Of the tiers one by one, whatever becomes of the others."""
        for tier in list(self.tiers.values()):
            self.ask(partial(call, tier))

    def leased(self, name: str, lease: Lease) -> TierLease:
        """Inside `ask`: a tier's answer to store or load."""
        return TierLease(name, self._watched(name, lease))

    def states(self, leases: Sequence[TierLease], timeout_s: float = 0.0) -> list[LeaseState]:
        """Of each lease; the last one is waited for. Those of tiers that are gone have failed."""

        def look() -> list[LeaseState]:
            last = len(leases) - 1
            return [
                one.lease.wait(timeout_s if number == last else 0.0) if one.tier in self.tiers else "failed"
                for number, one in enumerate(leases)
            ]

        return (self.ask(look) if leases else []) or ["failed"] * len(leases)

    def cancel(self, leases: Sequence[TierLease]) -> None:
        def cancel() -> None:
            for one in leases:
                if one.tier in self.tiers:
                    one.lease.cancel()

        if leases:
            self.ask(cancel)


def _label(name: str) -> str:
    return f"kv tier '{name}'"


def block_keys(namespace: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The key of every whole block: BLAKE2b (RFC 7693) of format, namespace, size and all tokens up to its end."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(digest_of({"block": FORMAT, "namespace": namespace, "block_size": block_size}))
    for end in range(block_size, len(token_ids) + 1, block_size):
        digest.update(struct.pack(f"<{block_size}q", *token_ids[end - block_size : end]))
        yield digest.digest()
