"""A KV manager with groups, and what its tensors would hold: slot -> token for each group. Judges what is seen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import DROP_UNIT
from pluglm.testing.batches import slots_at
from pluglm.testing.check import expect


class Desk:
    """texts: the known tokens of each live sequence; computed: how many of them are written; told: by `advance`."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.size: int = manager.layout.block_size
        self.unit = math.lcm(self.size, DROP_UNIT)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.told: dict[int, int] = {}
        self._held: list[dict[int, int]] = [{} for _ in manager.layout.groups]
        self._next_filler = 1 << 20

    def commit(self, transaction: Any) -> None:
        """Commit and do the block copies, all sources read first."""
        copies, first = transaction.commit(), 0
        for group, held in zip(self.manager.layout.groups, self._held, strict=True):
            own = [(one - first, other - first) for one, other in copies if first <= one < first + group.num_blocks]
            before, first = dict(held), first + group.num_blocks
            for source, target in own:
                for offset in range(self.size):
                    held[target * self.size + offset] = before.get(source * self.size + offset, -1)

    def change(self, operation: Callable[[Any], Any]) -> None:
        """One operation in a transaction of its own."""
        transaction = self.manager.transaction()
        operation(transaction)
        self.commit(transaction)

    def start(self, sequence_id: int, num_tokens: int, is_advanced: bool = True) -> None:
        """As the engine does: acquire, advance, extend to the whole prompt. KVExhausted when there is no room."""
        transaction = self.manager.transaction()
        transaction.acquire(sequence_id)
        if is_advanced:
            transaction.advance(sequence_id, 0)
        try:
            transaction.extend(sequence_id, num_tokens)
        except KVExhausted:
            transaction.rollback()
            raise
        self.commit(transaction)

    def advance(self, sequence_id: int, num_computed: int) -> None:
        self.change(lambda transaction: transaction.advance(sequence_id, num_computed))

    def release(self, sequence_id: int) -> None:
        self.change(lambda transaction: transaction.release(sequence_id))

    def take_the_rest(self, is_advanced: bool = True, num_tokens: int = 1) -> list[int]:
        """Start further sequences until the next one finds no room; returns their ids."""
        ids: list[int] = []
        while True:
            try:
                self.start(self._next_filler, num_tokens, is_advanced)
            except KVExhausted:
                return ids
            ids.append(self._next_filler)
            self._next_filler += 1

    def snapshot(self, ids: list[int]) -> tuple[Any, ...]:
        return self.manager.capacity(), *(self.manager.group_tables(one) for one in ids)

    def random_step(self, step: int, generator: random.Random, longest: int, most: int) -> None:
        """Like a step of an engine with one sequence: start it, compute a chunk, fork it, or end it."""
        choice = generator.choice(("start", "fork", "end", *["compute"] * 9))
        if choice == "start" or not self.texts:
            text = [step * 1000 + number for number in range(generator.randint(1, longest))]
            self._try(lambda: self.start(step, len(text)), lambda: self._know(step, text, 0, 0))
            return
        one = generator.choice(sorted(self.texts))
        if choice == "end":
            self.release(one)
            del self.texts[one], self.computed[one], self.told[one]
        elif choice == "fork" and self.computed[one] == len(self.texts[one]):
            kept = max(self.told[one], self.computed[one] - generator.randint(0, 1))
            new = [step * 1000 + number for number in range(generator.choice((0, 0, longest)))]
            self._fork(one, step, kept, new[: longest - kept])
        else:
            self._compute(one, step, generator, longest, most)

    def _try(self, change: Callable[[], None], then: Callable[[], None]) -> None:
        try:
            change()
        except KVExhausted:
            return
        then()

    def _know(self, sequence_id: int, text: list[int], num_computed: int, num_told: int) -> None:
        self.texts[sequence_id], self.computed[sequence_id], self.told[sequence_id] = text, num_computed, num_told

    def _fork(self, parent: int, child: int, kept: int, new: list[int]) -> None:
        """new: tokens that the child is known to have next."""

        def fork(transaction: Any) -> None:
            transaction.fork(parent, child)
            transaction.trim(child, kept)

        self.change(fork)
        self._know(child, [*self.texts[parent][:kept], *new], kept, self.told[parent])

    def _compute(self, one: int, step: int, generator: random.Random, longest: int, most: int) -> None:
        """A chunk of the prompt, or a new token and up to three drafts, of which some are refused afterwards."""
        text, done = self.texts[one], self.computed[one]
        drafts = 0
        if done == len(text):
            drafts = generator.randint(0, 3)
            text = [*text, *(step * 1000 + number for number in range(1 + drafts))][:longest]
        stop = min(len(text), done + generator.randint(1, most))
        if stop == done:
            return

        def grow() -> None:
            transaction = self.manager.transaction()
            transaction.advance(one, done)
            try:
                transaction.extend(one, generator.choice((stop, len(text))))
            except KVExhausted:
                transaction.rollback()
                raise
            self.commit(transaction)

        def write() -> None:
            self._write(one, text, done, stop)
            kept = max(done + 1, stop - generator.randint(0, drafts))
            if kept < stop:
                self.change(lambda transaction: transaction.trim(one, kept))
            self._know(one, text[:kept] if drafts else text, kept, done)

        self._try(grow, write)

    def _slots(self, sequence_id: int, index: int, positions: range) -> list[int]:
        table = self.manager.group_tables(sequence_id)[index]
        return slots_at(table.blocks, (position - table.num_dropped for position in positions), self.size)

    def _write(self, sequence_id: int, text: list[int], start: int, stop: int) -> None:
        for index, held in enumerate(self._held):
            held.update(zip(self._slots(sequence_id, index, range(start, stop)), text[start:stop], strict=True))

    def expect_seen(self, sequence_id: int, when: str) -> None:
        """In each group, the tokens that the sequence's next query sees, without itself."""
        num_computed, tables = self.computed[sequence_id], self.manager.group_tables(sequence_id)
        for index, group in enumerate(self.manager.layout.groups):
            first = 0 if group.window is None else max(0, num_computed - group.window + 1)
            expect(tables[index].num_dropped <= first, f"at most {first} tokens dropped {when}", tables[index])
            wanted = self.texts[sequence_id][first:num_computed]
            slots = self._slots(sequence_id, index, range(first, num_computed))
            found = [self._held[index].get(slot, -1) for slot in slots]
            expect(found == wanted, f"{wanted} of sequence {sequence_id} in {group} {when}", found)
