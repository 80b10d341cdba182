"""A plain KV manager for contexts and simulations: copies the whole book for each transaction. Slow and obvious."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from pluglm.kernel.core import CacheKey
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import Capacity, KVLayout


@dataclass(slots=True)
class Book:
    """tables and sizes by sequence id; a block is free when no table holds it."""

    tables: dict[int, list[int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Book:
        return Book({one: list(table) for one, table in self.tables.items()}, dict(self.sizes))

    def holders(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)


class BlockTransaction:
    """Works on a copy of the book; commit puts it in place of the manager's."""

    def __init__(self, manager: BlockPool) -> None:
        self.manager, self.book = manager, manager.book.copy()
        self.copies: dict[int, int] = {}  # target -> source

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        if sequence_id in self.book.tables:
            raise ValueError(f"sequence {sequence_id} already has a table")
        self.book.tables[sequence_id], self.book.sizes[sequence_id] = [], 0
        return 0

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        table, size = self.book.tables[sequence_id], self.book.sizes[sequence_id]
        if num_tokens <= size:
            return
        first_written = size // self.manager.block_size
        shared = [i for i in range(first_written, len(table)) if self.book.holders()[table[i]] > 1]
        num_new = max(0, -(-num_tokens // self.manager.block_size) - len(table))
        free = self.free_list()
        if len(shared) + num_new > len(free):
            raise KVExhausted(f"sequence {sequence_id} needs {len(shared) + num_new} blocks, {len(free)} are free")
        for index in shared:
            target = free.pop(0)
            self.copies[target] = self.copies.get(table[index], table[index])
            table[index] = target
        table.extend(free[:num_new])
        self.book.sizes[sequence_id] = num_tokens

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        size = min(num_tokens, self.book.sizes[sequence_id])
        del self.book.tables[sequence_id][-(-size // self.manager.block_size) :]
        self.book.sizes[sequence_id] = size
        self._forget_copies()

    def fork(self, parent_id: int, child_id: int) -> None:
        self.acquire(child_id)
        self.book.tables[child_id] = list(self.book.tables[parent_id])
        self.book.sizes[child_id] = self.book.sizes[parent_id]

    def release(self, sequence_id: int) -> None:
        if sequence_id not in self.book.tables:
            raise ValueError(f"sequence {sequence_id} holds no table")
        del self.book.tables[sequence_id], self.book.sizes[sequence_id]
        self._forget_copies()

    def _forget_copies(self) -> None:
        """A block that became free may be handed out again; what was to be copied into it is void."""
        held = self.book.holders()
        self.copies = {target: source for target, source in self.copies.items() if held[target]}

    def free_list(self) -> list[int]:
        held = self.book.holders()
        return [block for block in range(self.manager.num_blocks) if not held[block]]

    def free_blocks(self, evict: bool = True) -> int:
        return len(self.free_list())

    def commit(self) -> tuple[tuple[int, int], ...]:
        self.manager.book, self.manager.is_open = self.book, False
        return tuple((source, target) for target, source in self.copies.items())

    def rollback(self) -> None:
        self.manager.is_open = False


class BlockPool:
    """A KVManager of num_blocks fixed blocks. Every operation costs O(blocks)."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    interface_version: ClassVar[int] = 2
    Transaction: ClassVar[type[BlockTransaction]] = BlockTransaction

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.book, self.is_open = Book(), False

    @property
    def layout(self) -> KVLayout:
        return KVLayout(num_blocks=self.num_blocks, block_size=self.block_size)

    def capacity(self) -> Capacity:
        held = len(self.book.holders())
        return Capacity(total_blocks=self.num_blocks, free_blocks=self.num_blocks - held, held_blocks=held)

    def max_request_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def transaction(self) -> BlockTransaction:
        if self.is_open:
            raise RuntimeError("a KV transaction is already open")
        self.is_open = True
        return self.Transaction(self)

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        return tuple(self.book.tables[sequence_id])

    def audit(self) -> None:
        for one, table in self.book.tables.items():
            if len(table) != -(-self.book.sizes[one] // self.block_size) or len(set(table)) != len(table):
                raise RuntimeError(f"sequence {one} of {self.book.sizes[one]} tokens holds blocks {table}")


class BlockKVConfig(ComponentConfig):
    """block_size: tokens of a block."""

    block_size: int = Field(default=4, ge=1)


class BlockKV(BlockPool):
    """The same as a component: kv_bytes of the context divided into blocks of the configured size."""

    Config: ClassVar[type[ComponentConfig]] = BlockKVConfig

    def __init__(self, config: BlockKVConfig, context: BuildContext) -> None:
        super().__init__(context.kv_bytes // (context.bytes_per_token * config.block_size), config.block_size)
