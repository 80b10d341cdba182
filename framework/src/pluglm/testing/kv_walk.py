"""A random walk over a KV manager's operations, committed or rolled back. Judges nothing."""

from __future__ import annotations

import random

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVManager, KVTransaction


class Walk:
    """One step is a transaction of one to three operations. ids: the sequences that hold a table, with their sizes."""

    def __init__(self, manager: KVManager, generator: random.Random) -> None:
        self.manager, self._random = manager, generator
        self.ids: dict[int, int] = {}
        self._next_id = 0

    def step(self) -> None:
        transaction, sizes = self.manager.transaction(), dict(self.ids)
        for _ in range(self._random.randint(1, 3)):
            self._operate(transaction, sizes)
        if self._random.random() < 0.2:
            transaction.rollback()
            return
        transaction.commit()
        self.ids = sizes

    def _operate(self, transaction: KVTransaction, sizes: dict[int, int]) -> None:
        choice = self._random.choice(("start", "extend", "extend", "trim", "release"))
        if choice == "start" or not sizes:
            self._start(transaction, sizes)
            return
        one = self._random.choice(sorted(sizes))
        if choice == "release":
            transaction.release(one)
            del sizes[one]
        elif choice == "trim":
            sizes[one] = self._random.randint(1, sizes[one])
            transaction.trim(one, sizes[one])
        else:
            self._extend(transaction, sizes, one)

    def _start(self, transaction: KVTransaction, sizes: dict[int, int]) -> None:
        one, self._next_id = self._next_id, self._next_id + 1
        transaction.acquire(one)
        try:
            transaction.extend(one, 1)
        except KVExhausted:
            transaction.release(one)
            return
        sizes[one] = 1

    def _extend(self, transaction: KVTransaction, sizes: dict[int, int], one: int) -> None:
        size = min(sizes[one] + self._random.randint(1, 12), self.manager.max_request_tokens())
        try:
            transaction.extend(one, size)
        except KVExhausted:
            return
        sizes[one] = size

    def drain(self) -> None:
        """Release every sequence, one transaction each."""
        for one in list(self.ids):
            transaction = self.manager.transaction()
            transaction.release(one)
            transaction.commit()
            del self.ids[one]
