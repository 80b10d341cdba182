"""The part of the KV kit about groups of layers: what a window drops, what it keeps, and that a promise holds.

A dictionary of slots stands for each group's tensors. The sequences here are advanced as the engine does it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.interfaces.kv import DROP_UNIT, KVGroup
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.testing.check import Check, expect, expect_raises, make_check
from pluglm.testing.context import make_context, small_spec
from pluglm.testing.kv_groups_desk import Desk

MakeGrouped = Callable[[], Any]
WINDOWS = (24, None, 24, 100)  # of the four layers
MAX_STEP_TOKENS = 48
LONG = 600  # tokens; the pools have room for a few such sequences


def windowed_spec() -> ModelSpec:
    """Four layers; the second sees everything, the last has keys of another size."""
    layers = small_spec(num_layers=4).layers
    shapes = [{**_fields(layer), "window": window} for layer, window in zip(layers, WINDOWS, strict=True)]
    shapes[3]["head_dim"] = 16
    return ModelSpec(
        family="table",
        hidden_size=32,
        vocab_size=320,
        max_position=1024,
        layers=tuple(LayerSpec(**shape) for shape in shapes),
    )


def _fields(layer: LayerSpec) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("index", "num_heads", "num_kv_heads", "head_dim", "scale")}


def group_checks(cls: type[Any], config: Any) -> Iterator[Check]:
    """Every check of the LayerGroups protocol, for a model with two windows and a layer without one."""
    spec = windowed_spec()
    token_bytes = spec.kv_values_per_token * 4
    fields = {"spec": spec, "max_model_len": LONG, "max_step_tokens": MAX_STEP_TOKENS, "bytes_per_token": token_bytes}

    def make() -> Any:
        return cls(config, make_context(**fields, kv_bytes=4 * (LONG + 100) * token_bytes))

    for function in CHECKS:
        yield make_check(function, make)


def groups_divide_the_layers(make: MakeGrouped) -> None:
    groups: tuple[KVGroup, ...] = make().layout.groups
    found = sorted(layer for group in groups for layer in group.layers)
    expect(found == [0, 1, 2, 3], "every layer in one group", groups)
    right = all(WINDOWS[layer] == group.window for group in groups for layer in group.layers)
    expect(right, f"each layer's window, {WINDOWS}, on its group", groups)


def tables_have_the_blocks_of_their_group(make: MakeGrouped) -> None:
    """And block_table has all of them, numbered as in the layout."""
    desk = Desk(make())
    groups = desk.manager.layout.groups
    expect(sum(one.num_blocks for one in groups) == desk.manager.layout.num_blocks, "num_blocks of all groups", groups)
    for sequence_id in desk.take_the_rest(num_tokens=LONG // 4):
        numbered, first = [], 0
        for group, table in zip(groups, desk.manager.group_tables(sequence_id), strict=True):
            expect(all(0 <= one < group.num_blocks for one in table.blocks), f"blocks of {group}", table)
            numbered += [first + one for one in table.blocks]
            first += group.num_blocks
        found = desk.manager.block_table(sequence_id)
        expect(found == tuple(numbered), f"a block table {tuple(numbered)}", found)


def nothing_is_dropped_before_it_advances(make: MakeGrouped) -> None:
    desk = Desk(make())
    transaction = desk.manager.transaction()
    transaction.acquire(1)
    for num_tokens in range(10, 150, 10):
        transaction.extend(1, num_tokens)
    transaction.trim(1, 3)
    transaction.extend(1, 150)
    desk.commit(transaction)
    for table in desk.manager.group_tables(1):
        room = len(table.blocks) * desk.size
        expect(table.num_dropped == 0 and room >= 150, "room for all 150 tokens of a sequence never advanced", table)


def only_unseen_tokens_are_dropped(make: MakeGrouped) -> None:
    desk = Desk(make())
    desk.start(1, LONG)
    for num_computed in range(0, LONG, MAX_STEP_TOKENS - 1):
        desk.advance(1, num_computed)
        for group, table in zip(desk.manager.layout.groups, desk.manager.group_tables(1), strict=True):
            seen_from = 0 if group.window is None else max(0, num_computed - group.window + 1)
            expect(table.num_dropped <= seen_from, f"at most {seen_from} tokens dropped at {num_computed}", table)
            whole = table.num_dropped % desk.size == 0 and table.num_dropped % DROP_UNIT == 0
            expect(whole, f"whole blocks of {desk.size} and whole units of {DROP_UNIT} dropped", table)


def a_promise_is_kept_in_a_full_pool(make: MakeGrouped) -> None:
    """What was extended once can be computed step by step, also when others take all that is free."""
    desk = Desk(make())
    desk.start(1, LONG)
    desk.take_the_rest()
    for num_computed in range(0, LONG, MAX_STEP_TOKENS):
        desk.advance(1, num_computed)
        needed = min(LONG, num_computed + MAX_STEP_TOKENS)
        for table in desk.manager.group_tables(1):
            room = table.num_dropped + len(table.blocks) * desk.size
            expect(room >= needed, f"room for {needed} tokens after it advanced to {num_computed}", table)
        desk.take_the_rest()


def what_a_window_leaves_serves_others(make: MakeGrouped) -> None:
    desk = Desk(make())
    desk.start(1, LONG)
    desk.advance(1, LONG)
    for group, table in zip(desk.manager.layout.groups, desk.manager.group_tables(1), strict=True):
        kept = len(table.blocks) * desk.size
        if group.window is None:
            expect(table.num_dropped == 0 and kept >= LONG, "all tokens of a layer without a window", table)
        elif desk.unit < LONG - group.window:
            expect(kept < LONG, f"fewer than all {LONG} tokens behind a window of {group.window}", table)
    before = desk.manager.capacity().held_blocks
    desk.release(1)
    expect(desk.manager.capacity().held_blocks == 0, f"all of its {before} blocks back", desk.manager.capacity())


def going_back_is_refused(make: MakeGrouped) -> None:
    """To what layers with a window have given back; as far as it was advanced is no way back."""
    desk = Desk(make())
    desk.start(1, LONG)
    desk.advance(1, LONG - 10)
    desk.change(lambda transaction: transaction.trim(1, LONG - 10))
    before = desk.snapshot([1])
    transaction = desk.manager.transaction()
    if any(table.num_dropped for table in desk.manager.group_tables(1)):
        with expect_raises(ValueError, "for a trim to tokens whose window was given back"):
            transaction.trim(1, 20)
        with expect_raises(ValueError, "for an advance to tokens whose window was given back"):
            transaction.advance(1, 20)
    with expect_raises(ValueError, "for an advance beyond the sequence"):
        transaction.advance(1, LONG)
    transaction.commit()
    expect(desk.snapshot([1]) == before, f"the state before the refused calls, {before}", desk.snapshot([1]))


def exhaustion_in_one_group_changes_no_other(make: MakeGrouped) -> None:
    """Sequences that advanced leave room behind windows alone; others fill the smallest pool first."""
    for is_advanced in (True, False):
        desk = Desk(make())
        ids = desk.take_the_rest(is_advanced, LONG)
        for sequence_id in ids if is_advanced else ():
            desk.advance(sequence_id, LONG)
        ids += [*desk.take_the_rest(is_advanced, LONG // 4), *desk.take_the_rest(is_advanced)]
        before = desk.snapshot(ids)
        transaction = desk.manager.transaction()
        expect(transaction.free_blocks() == 0, "no free blocks where a group has none", transaction.free_blocks())
        for sequence_id in ids:
            with expect_raises(KVExhausted, "for an extension of a sequence beyond a full pool"):
                transaction.extend(sequence_id, 2 * LONG)
        transaction.commit()
        expect(desk.snapshot(ids) == before, f"the state before the failed extensions, {before}", desk.snapshot(ids))


def an_advance_can_be_rolled_back(make: MakeGrouped) -> None:
    desk = Desk(make())
    desk.start(1, LONG)
    desk.advance(1, 40)
    before = desk.snapshot([1])
    transaction = desk.manager.transaction()
    transaction.advance(1, LONG - 1)
    inside = desk.snapshot([1])
    transaction.rollback()
    expect(inside == before, f"the committed state {before} inside the transaction", inside)
    expect(desk.snapshot([1]) == before, f"the state before the transaction, {before}", desk.snapshot([1]))


def advancing_walk_keeps_what_is_seen(make: MakeGrouped) -> None:
    """Random prompts, chunks, forks, refused drafts and ends: every group reads back what the next query sees."""
    desk, generator = Desk(make()), random.Random(7)
    for step in range(300):
        desk.random_step(step, generator, LONG, MAX_STEP_TOKENS)
        desk.manager.audit()
        for sequence_id in desk.texts:
            desk.expect_seen(sequence_id, f"in step {step}")
    for sequence_id in list(desk.texts):
        desk.release(sequence_id)
    expect(desk.manager.capacity().held_blocks == 0, "nothing held at the end", desk.manager.capacity())


CHECKS = (
    groups_divide_the_layers,
    tables_have_the_blocks_of_their_group,
    nothing_is_dropped_before_it_advances,
    only_unseen_tokens_are_dropped,
    a_promise_is_kept_in_a_full_pool,
    what_a_window_leaves_serves_others,
    going_back_is_refused,
    exhaustion_in_one_group_changes_no_other,
    an_advance_can_be_rolled_back,
    advancing_walk_keeps_what_is_seen,
)
