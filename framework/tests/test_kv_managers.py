"""Both KV managers against a dictionary of what each sequence's tokens must be, with the audit after every step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import Capacity, KVManager
from pluglm.kv.contiguous import ContiguousKV
from pluglm.kv.paged import PagedKV

IDS = st.integers(0, 3)
SIZES = st.integers(0, 14)
NAMES = ["acquire", "extend", "trim", "release", "fork"]
UNWRITTEN = object()  # a token that was made room for and not written yet


def context(**more: Any) -> BuildContext:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BuildContext))
    fields.update(max_num_seqs=4, max_model_len=32, kv_bytes=1 << 20, bytes_per_token=8)
    return BuildContext(**{**fields, **more})


class Memory:
    """The outside authority: every block's content as a list of tokens, written and copied as a backend would."""

    def __init__(self, manager: KVManager) -> None:
        layout = manager.layout
        self.block_size = layout.block_size
        self.blocks: list[list[Any]] = [[None] * self.block_size for _ in range(layout.num_blocks)]

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        sources = [list(self.blocks[source]) for source, _ in copies]
        for (_, target), content in zip(copies, sources, strict=True):
            self.blocks[target] = content

    def write(self, table: tuple[int, ...], position: int, token: Any) -> None:
        self.blocks[table[position // self.block_size]][position % self.block_size] = token

    def read(self, table: tuple[int, ...], count: int) -> list[Any]:
        return [self.blocks[table[p // self.block_size]][p % self.block_size] for p in range(count)]


class KVMachine(RuleBasedStateMachine):
    """Transactions of a few operations, committed or rolled back; `tokens` is what each sequence must read back."""

    manager: KVManager

    def build(self, block_size: int, num_blocks: int) -> KVManager:
        config = PagedKV.Config(block_size=block_size, num_blocks=num_blocks)
        return PagedKV(config, context())

    @initialize(block_size=st.integers(1, 5), num_blocks=st.integers(1, 16))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.manager = self.build(block_size, num_blocks)
        self.memory = Memory(self.manager)
        self.tokens: dict[int, list[Any]] = {}
        self.num_written = 0

    @rule(operations=st.lists(st.tuples(st.sampled_from(NAMES), IDS, SIZES), max_size=6), commit=st.booleans())
    def transact(self, operations: list[tuple[str, int, int]], commit: bool) -> None:
        """Any operations, misuse included. Sizes are child ids where the operation is a fork."""
        expected = {sequence_id: list(tokens) for sequence_id, tokens in self.tokens.items()}
        before = self.manager.capacity()
        transaction = self.manager.transaction()
        for name, sequence_id, size in operations:
            if name == "fork" and UNWRITTEN in expected.get(sequence_id, ()):
                continue  # the contract of fork: copies are made before the step writes
            self.apply(transaction, name, sequence_id, size % 4 if name == "fork" else size, expected)
        if not commit:
            transaction.rollback()
            assert self.manager.capacity() == before
            return
        self.memory.copy(transaction.commit())
        self.tokens = expected
        for sequence_id, tokens in expected.items():
            for position in (p for p, token in enumerate(tokens) if token is UNWRITTEN):
                self.num_written += 1
                tokens[position] = self.num_written
                self.memory.write(self.manager.block_table(sequence_id), position, self.num_written)

    def apply(self, transaction: Any, name: str, sequence_id: int, size: int, expected: dict[int, list[Any]]) -> None:
        free = transaction.free_blocks()
        arguments = (sequence_id,) if name in ("acquire", "release") else (sequence_id, size)
        if (name == "acquire") == (sequence_id in expected) or (name == "fork" and size in expected):
            with pytest.raises(ValueError, match="KV sequence"):
                getattr(transaction, name)(*arguments)
            return
        try:
            getattr(transaction, name)(*arguments)
        except KVExhausted:
            assert name == "extend"
            assert transaction.free_blocks() == free
            return
        if name == "acquire":
            expected[sequence_id] = []
        elif name == "release":
            del expected[sequence_id]
        elif name == "trim":
            del expected[sequence_id][size:]
        elif name == "fork":
            expected[size] = list(expected[sequence_id])
        else:
            expected[sequence_id] += [UNWRITTEN] * (size - len(expected[sequence_id]))

    # Sensible transactions, so that most runs get far enough for sharing to matter.

    @rule(sequence_id=IDS, count=st.integers(1, 6))
    def append(self, sequence_id: int, count: int) -> None:
        start = [] if sequence_id in self.tokens else [("acquire", sequence_id, 0)]
        size = len(self.tokens.get(sequence_id, ())) + count
        self.transact([*start, ("extend", sequence_id, size)], True)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.tokens)))
        size = len(self.tokens[sequence_id])
        kept = data.draw(st.integers(0, size))
        self.transact([("trim", sequence_id, kept), ("extend", sequence_id, data.draw(st.integers(kept, size)))], True)

    @precondition(lambda self: 0 < len(self.tokens) < 4)
    @rule(data=st.data(), grow=st.booleans())
    def fork_and_grow(self, data: st.DataObject, grow: bool) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        child = min({0, 1, 2, 3} - self.tokens.keys())
        size = len(self.tokens[parent]) + 1
        self.transact([("fork", parent, child), *([("extend", child, size), ("extend", parent, size)] * grow)], True)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.manager.audit()
        tables = {sequence_id: self.manager.block_table(sequence_id) for sequence_id in self.tokens}
        for sequence_id, tokens in self.tokens.items():
            assert self.memory.read(tables[sequence_id], len(tokens)) == tokens
        held = len({block for table in tables.values() for block in table})
        total = self.manager.layout.num_blocks
        assert self.manager.capacity() == Capacity(total_blocks=total, free_blocks=total - held, held_blocks=held)


class ContiguousMachine(KVMachine):
    def build(self, block_size: int, num_blocks: int) -> KVManager:
        config = ContiguousKV.Config(num_regions=num_blocks, region_tokens=2 * block_size)
        return ContiguousKV(config, context())


TestPaged: Any = KVMachine.TestCase
TestPaged.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

TestContiguous: Any = ContiguousMachine.TestCase
TestContiguous.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
