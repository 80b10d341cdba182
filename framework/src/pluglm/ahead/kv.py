"""A KV manager with a transaction that may stay open between two acts of the engine. Knows who ends it, no blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluglm.kernel.core import CacheKey
    from pluglm.kernel.interfaces.kv import KVTransaction


class AheadKV:
    """A KVManager as it is, but for one transaction at a time that is held open: whatever else changes the KV ends it.

    So as long as it is open, the KV is as it was when it was opened.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._held: KVTransaction | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def hold(self) -> KVTransaction:
        """Open it."""
        self._held = held = self.transaction()
        return held

    def holds(self, transaction: object) -> bool:
        """Whether it is this one, and still open."""
        return transaction is not None and transaction is self._held

    def let_go(self) -> None:
        """It is the caller's now, to commit or to roll back."""
        self._held = None

    def transaction(self) -> KVTransaction:
        self._end()
        transaction: KVTransaction = self._manager.transaction()
        return transaction

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        self._end()
        self._manager.publish(sequence_id, key)

    def reset(self) -> None:
        self._end()
        self._manager.reset()

    def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.rollback()
