"""A random walk over a prefix-caching KV manager: prompts with common beginnings, forks, trims, evictions, resets.

A dictionary of slots stands for the tensors and a set of texts for the cache; what is read back is judged against both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pluglm.kernel.core import CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.testing.check import expect
from pluglm.testing.kv_sharing import Slots


@dataclass(slots=True)
class Text:
    """A sequence: known tokens, how many of them are stored, and how many of those were there before this step."""

    namespace: bytes
    token_ids: list[int]
    num_computed: int = 0
    num_written: int = 0

    def copy(self) -> Text:
        return Text(self.namespace, list(self.token_ids), self.num_computed, self.num_written)

    def key(self, limit: int) -> CacheKey:
        return CacheKey(namespace=self.namespace, token_ids=self.token_ids, limit=limit)


def common_length(first: list[int], second: list[int]) -> int:
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


@dataclass(slots=True)
class PrefixWalk:
    """One step is a transaction of some operations, then publications. texts: of the sequences that hold a table."""

    slots: Slots
    random: random.Random
    with_forks: bool = True
    texts: dict[int, Text] = field(default_factory=dict)
    published: list[tuple[bytes, list[int]]] = field(default_factory=list)
    next_id: int = 0

    def step(self) -> None:
        manager, before = self.slots.manager, {one: text.copy() for one, text in self.texts.items()}
        transaction = manager.transaction()
        for _ in range(self.random.randint(1, 4)):
            self._operate(transaction)
        if self.random.random() < 0.2:
            transaction.rollback()
            self.texts = before
        else:
            self.slots.commit(transaction)
            for one, text in self.texts.items():
                self.slots.write(one, text.num_written, text.token_ids[text.num_written : text.num_computed])
                text.num_written = text.num_computed
        for one in sorted(self.texts):
            if self.random.random() < 0.7:
                self.publish(one)

    def _operate(self, transaction: KVTransaction) -> None:
        names = ["start", "start", "extend", "extend", "extend", "release", *["fork", "trim"] * self.with_forks]
        name = self.random.choice(names)
        if name == "start" or not self.texts:
            self._start(transaction)
            return
        one = self.random.choice(sorted(self.texts))
        if name == "release":
            self.release(transaction, one)
        elif name == "trim":
            self._trim(transaction, one)
        elif name == "extend":
            self._extend(transaction, one, self.random.randint(1, 9))
        elif self.texts[one].num_written == self.texts[one].num_computed:
            transaction.fork(one, self.next_id)
            self.texts[self.next_id] = self.texts[one].copy()
            self.next_id += 1

    def new_text(self) -> Text:
        """Often one that begins like an earlier one, or is the same."""
        namespace, token_ids = self.random.choice([b"first", b"second"]), list[int]()
        if self.published and self.random.random() < 0.8:
            _, earlier = self.random.choice(self.published)
            token_ids = earlier[: self.random.randint(0, len(earlier))]
        token_ids += [self.random.randint(0, 2) for _ in range(self.random.randint(1, 12))]
        return Text(namespace, token_ids[: self.slots.manager.max_request_tokens()])

    def _start(self, transaction: KVTransaction) -> None:
        one, text = self.next_id, self.new_text()
        self.next_id += 1
        limit = self.random.randint(0, len(text.token_ids))
        text.num_computed = text.num_written = transaction.acquire(one, text.key(limit))
        expect(0 <= text.num_computed <= limit, f"at most {limit} tokens adopted", text.num_computed)
        known = self.known_prefix(text)
        expect(text.num_computed <= known, f"at most the {known} tokens ever published", text.num_computed)
        self.texts[one] = text
        if not self._extend(transaction, one, self.random.randint(1, 9)) and self.random.random() < 0.7:
            transaction.release(one)
            del self.texts[one]

    def known_prefix(self, text: Text) -> int:
        """The longest beginning that any published text of the namespace has too."""
        texts = [token_ids for namespace, token_ids in self.published if namespace == text.namespace]
        return max((common_length(text.token_ids, token_ids) for token_ids in texts), default=0)

    def _extend(self, transaction: KVTransaction, one: int, num_tokens: int) -> bool:
        text = self.texts[one]
        size = min(text.num_computed + num_tokens, self.slots.manager.max_request_tokens())
        evict = self.random.random() < 0.8
        free = transaction.free_blocks(evict)
        try:
            transaction.extend(one, size, evict)
        except KVExhausted:
            blocks, left = -(-size // self.slots.manager.layout.block_size), transaction.free_blocks(evict)
            expect(left == free, f"{free} free blocks after a refusal", left)
            expect(free <= blocks, f"room for {blocks} blocks when {free} are free or cached", "KVExhausted")
            return False
        text.token_ids += [self.random.randint(0, 2) for _ in range(size - len(text.token_ids))]
        text.num_computed = size
        return True

    def _trim(self, transaction: KVTransaction, one: int) -> None:
        """The last tokens are taken back, and others may come in their place."""
        text = self.texts[one]
        text.num_computed = self.random.randint(max(0, text.num_computed - 6), text.num_computed)
        text.num_written = min(text.num_written, text.num_computed)
        text.token_ids = text.token_ids[: text.num_computed]
        transaction.trim(one, text.num_computed)

    def release(self, transaction: KVTransaction, one: int) -> None:
        transaction.release(one)
        del self.texts[one]

    def publish(self, one: int) -> None:
        text = self.texts[one]
        self.slots.manager.publish(one, text.key(text.num_computed))  # type: ignore[attr-defined]
        self.published.append((text.namespace, text.token_ids[: text.num_computed]))

    def judge(self) -> None:
        """Books, classes and every text, read back through its table."""
        manager = self.slots.manager
        manager.audit()
        for one, text in self.texts.items():
            found = self.slots.read(one, text.num_computed)
            expected = text.token_ids[: text.num_computed]
            expect(found == expected, f"the tokens of sequence {one}, {expected}", found)
