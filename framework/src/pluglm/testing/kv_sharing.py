"""The part of the KV kit about forks: children start with the parent's tokens and never write into its blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import KVManager, KVTransaction
from pluglm.testing.batches import slots_at
from pluglm.testing.check import Check, expect, make_check

Make = Callable[[], KVManager]


class Slots:
    """What the KV tensors would hold: slot -> token. Writes a sequence's tokens through its table, as a step does."""

    def __init__(self, manager: KVManager) -> None:
        self.manager, self.held = manager, dict[int, int]()

    def commit(self, transaction: KVTransaction) -> None:
        """Commit and do the block copies, all sources read first."""
        size, before = self.manager.layout.block_size, dict(self.held)
        for source, target in transaction.commit():
            for offset in range(size):
                self.held[target * size + offset] = before.get(source * size + offset, -1)

    def slots(self, sequence_id: int, positions: range) -> list[int]:
        return slots_at(self.manager.block_table(sequence_id), positions, self.manager.layout.block_size)

    def write(self, sequence_id: int, first: int, tokens: list[int]) -> None:
        self.held.update(zip(self.slots(sequence_id, range(first, first + len(tokens))), tokens, strict=True))

    def read(self, sequence_id: int, num_tokens: int) -> list[int]:
        return [self.held.get(slot, -1) for slot in self.slots(sequence_id, range(num_tokens))]


def fork_checks(make: Make) -> Iterator[Check]:
    """The checks of `fork`, copy on write and copy lists."""
    checks = (
        child_starts_with_the_parents_tokens,
        parent_never_sees_the_childs_writes,
        child_never_sees_the_parents_writes,
        forks_survive_the_parents_release,
        copies_read_all_sources_first,
        forked_walk_keeps_every_text,
    )
    for function in checks:
        yield make_check(function, make)


def _started(make: Make, share: int = 2) -> tuple[Slots, int]:
    """A sequence 1 of about a share of the pool whose last block holds one token, and its length."""
    slots = Slots(make())
    size = slots.manager.layout.block_size
    length = slots.manager.max_request_tokens() // share // size * size + 1
    transaction = slots.manager.transaction()
    transaction.acquire(1)
    transaction.extend(1, length)
    slots.commit(transaction)
    slots.write(1, 0, list(range(100, 100 + length)))
    return slots, length


def _fork(slots: Slots, parent: int, child: int) -> None:
    transaction = slots.manager.transaction()
    transaction.fork(parent, child)
    slots.commit(transaction)


def _append(slots: Slots, sequence_id: int, length: int, token: int) -> None:
    transaction = slots.manager.transaction()
    transaction.extend(sequence_id, length + 1)
    slots.commit(transaction)
    slots.write(sequence_id, length, [token])


def child_starts_with_the_parents_tokens(make: Make) -> None:
    slots, length = _started(make, share=4)
    _fork(slots, 1, 2)
    text = slots.read(2, length)
    expect(text == slots.read(1, length), "the parent's tokens in the child's blocks", text)


def parent_never_sees_the_childs_writes(make: Make) -> None:
    slots, length = _started(make)
    _append(slots, 1, length, 7)
    _fork(slots, 1, 2)
    transaction = slots.manager.transaction()
    transaction.trim(2, length)
    slots.commit(transaction)
    _append(slots, 2, length, 8)  # takes the place of the parent's last token, in the child only
    expect(slots.read(1, length + 1)[-1] == 7, "token 7 at the parent's end", slots.read(1, length + 1))


def child_never_sees_the_parents_writes(make: Make) -> None:
    slots, length = _started(make)
    _append(slots, 1, length, 7)
    _fork(slots, 1, 2)
    transaction = slots.manager.transaction()
    transaction.trim(1, length)
    slots.commit(transaction)
    _append(slots, 1, length, 9)
    expect(slots.read(2, length + 1)[-1] == 7, "token 7 at the child's end", slots.read(2, length + 1))


def forks_survive_the_parents_release(make: Make) -> None:
    slots, length = _started(make)
    _fork(slots, 1, 2)
    transaction = slots.manager.transaction()
    transaction.release(1)
    slots.commit(transaction)
    _append_new_sequences(slots)
    expected = list(range(100, 100 + length))
    expect(slots.read(2, length) == expected, f"the child's tokens {expected}", slots.read(2, length))


def _append_new_sequences(slots: Slots) -> None:
    """Fill what is free with other text."""
    for sequence_id in range(50, 50 + slots.manager.capacity().free_blocks):
        transaction = slots.manager.transaction()
        transaction.acquire(sequence_id)
        transaction.extend(sequence_id, 1)
        slots.commit(transaction)
        slots.write(sequence_id, 0, [0])


def copies_read_all_sources_first(make: Make) -> None:
    """A child of a child made in one transaction: the list must not copy from a block that it fills itself."""
    slots, length = _started(make)
    transaction = slots.manager.transaction()
    transaction.fork(1, 2)
    transaction.extend(2, length + 1)
    transaction.fork(2, 3)
    transaction.extend(3, length + 2)
    slots.commit(transaction)
    expected = list(range(100, 100 + length))
    expect(slots.read(3, length) == expected, f"the grandparent's tokens {expected}", slots.read(3, length))


def forked_walk_keeps_every_text(make: Make) -> None:
    """Random forks, appends, refusals of the last tokens and releases: every sequence reads back its own tokens."""
    slots, generator, texts = Slots(make()), random.Random(6), dict[int, list[int]]()
    for step in range(200):
        transaction, before = slots.manager.transaction(), {one: list(text) for one, text in texts.items()}
        try:
            _operate(transaction, texts, generator, step, slots.manager.max_request_tokens())
        except KVExhausted:
            transaction.rollback()
            texts = before
            continue
        slots.commit(transaction)
        for one, text in texts.items():
            slots.write(one, len(text) - 1, text[-1:])
        for one, text in texts.items():
            found = slots.read(one, len(text))
            expect(found == text, f"the tokens of sequence {one} in step {step}, {text}", found)


def _operate(
    transaction: KVTransaction, texts: dict[int, list[int]], generator: random.Random, step: int, most: int
) -> None:
    """One start, fork, append after dropping a few tokens, or release. Only an appended last token is to be written."""
    choice = generator.choice(("start", "fork", "append", "append", "append", "release"))
    if not texts or choice == "start":
        transaction.acquire(step)
        transaction.extend(step, 1)
        texts[step] = [step]
        return
    one = generator.choice(sorted(texts))
    if choice == "release":
        transaction.release(one)
        del texts[one]
    elif choice == "fork":
        transaction.fork(one, step)
        texts[step] = list(texts[one])
    else:
        kept = texts[one][: max(1, len(texts[one]) - generator.randint(0, 2))][: most - 1]
        transaction.trim(one, len(kept))
        transaction.extend(one, len(kept) + 1)
        texts[one] = [*kept, step]
