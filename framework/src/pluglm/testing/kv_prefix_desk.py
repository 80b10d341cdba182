"""A prefix-caching KV manager as an engine uses it, with slots that stand for its tensors. Judges only what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pluglm.kernel.core import CacheKey
from pluglm.kernel.interfaces.kv import KVManager, KVTransaction
from pluglm.testing.check import expect
from pluglm.testing.kv_sharing import Slots

Make = Callable[[], KVManager]
SPACE = b"model A"


def words(count: int, author: int = 0) -> list[int]:
    """Tokens of a text; texts of two authors have none in common."""
    return [100_000 * author + number for number in range(count)]


class Desk:
    """One transaction an operation, unless it says otherwise."""

    def __init__(self, make: Make) -> None:
        self.slots = Slots(make())
        self.manager: Any = self.slots.manager
        self.size = self.manager.layout.block_size
        self.num_blocks = self.manager.layout.num_blocks

    def change(self, *operations: Callable[[KVTransaction], object]) -> None:
        transaction = self.manager.transaction()
        for operation in operations:
            operation(transaction)
        self.slots.commit(transaction)

    def key(self, tokens: list[int], limit: int | None = None, namespace: bytes = SPACE) -> CacheKey:
        return CacheKey(namespace, tokens, len(tokens) if limit is None else limit)

    def start(self, one: int, tokens: list[int], key: CacheKey | None = None) -> int:
        """Acquire, make room for all tokens and store those that were not adopted; returns how many were."""
        adopted: list[int] = []
        self.change(lambda kv: adopted.append(kv.acquire(one, key)), lambda kv: kv.extend(one, len(tokens)))
        self.slots.write(one, adopted[0], tokens[adopted[0] :])
        return adopted[0]

    def publish(self, one: int, tokens: list[int], limit: int | None = None, namespace: bytes = SPACE) -> None:
        self.manager.publish(one, self.key(tokens, limit, namespace))

    def release(self, one: int) -> None:
        self.change(lambda kv: kv.release(one))

    def leave(self, one: int, tokens: list[int], namespace: bytes = SPACE) -> None:
        """Compute a text, publish it and be gone."""
        self.start(one, tokens)
        self.publish(one, tokens, namespace=namespace)
        self.release(one)

    def probe(self, tokens: list[int], limit: int | None = None, namespace: bytes = SPACE) -> int:
        return int(self.manager.probe(self.key(tokens, limit, namespace)))

    def whole(self, num_tokens: int) -> int:
        return num_tokens // self.size * self.size

    def expect_text(self, one: int, tokens: list[int], when: str) -> None:
        found = self.slots.read(one, len(tokens))
        expect(found == tokens, f"sequence {one} to hold its own tokens {when}", f"{found} instead of {tokens}")

    def has_room(self) -> bool:
        capacity = self.manager.capacity()
        return bool(capacity.free_blocks + capacity.cached_blocks)
