"""Bugs to plant, at least one for each invariant: what engines have really got wrong, one small change each.

Each is planted with a MonkeyPatch, and names the invariant that the oracle must then see broken first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from trace_model import TraceSampler, draw
from trace_policies import ChaosPolicy
from trace_tier import TraceTier

from pluglm.kernel import admission, engine, memory, planner, planning
from pluglm.kernel.core import CacheKey, Event, Sequence
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.scheduler import Skip, Victims
from pluglm.kernel.memory import Memory
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kernel.planning import Planning
from pluglm.kv.transaction import BlockTransaction
from pluglm_schedulers.fcfs import FcfsPolicy

Patch = pytest.MonkeyPatch
CACHES = ("hash_prefix", "radix")


@dataclass(frozen=True, slots=True)
class Bug:
    """plant changes the code; kvs and policies are those that it shows with, all when empty."""

    invariant: str
    plant: Callable[[Patch], None]
    kvs: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.invariant}-{self.plant.__name__}"


def released_block_is_lost(patch: Patch) -> None:
    def release(self: Any, sequence_id: int) -> None:
        table = self._table(sequence_id)
        self._tables[sequence_id] = None
        for block in table.blocks[1:]:
            self._drop(block)

    patch.setattr(BlockTransaction, "release", release)


def ended_sequence_keeps_its_blocks(patch: Patch) -> None:
    patch.setattr(Memory, "give_back", lambda self, sequence: None)


def fork_is_not_counted(patch: Patch) -> None:
    patch.setattr(BlockTransaction, "fork", lambda self, parent, child: self._start(child, self._table(parent)))


def dropped_share_is_still_counted(patch: Patch) -> None:
    drop = BlockTransaction._drop
    patch.setattr(BlockTransaction, "_drop", lambda self, block: self._num_holders(block) > 1 or drop(self, block))


def block_is_freed_twice(patch: Patch) -> None:
    apply = BlockTransaction._apply

    def twice(self: Any) -> None:
        self._returned += self._returned[:1]
        apply(self)

    patch.setattr(BlockTransaction, "_apply", twice)


def shared_block_is_not_copied(patch: Patch) -> None:
    patch.setattr(BlockTransaction, "_needs_copy", lambda self, *_: False)


def copy_is_never_made(patch: Patch) -> None:
    commit = BlockTransaction.commit
    patch.setattr(BlockTransaction, "commit", lambda self: commit(self) and ())


def salts_share_a_namespace(patch: Patch) -> None:
    named = admission.cache_namespace
    patch.setattr(admission, "cache_namespace", lambda parts, salt, num_prompt: named(parts, "", num_prompt))


def restored_blocks_are_mixed_up(patch: Patch) -> None:
    write = memory.write_blocks

    def mixed(store: Any, tables: Any, saved: Any) -> None:
        write(store, tables, saved._replace(data=[one.flip(0).flip(1) for one in saved.data]))

    patch.setattr(engine, "write_blocks", mixed)


def tier_brings_other_blocks(patch: Patch) -> None:
    load = TraceTier.load

    def other(self: Any, key: bytes, token_ids: Any) -> Any:
        lease = load(self, key, token_ids)
        lease.data = [one + 1 for one in lease.data]
        return lease

    patch.setattr(TraceTier, "load", other)


def stale_prefixes_survive_a_reset(patch: Patch) -> None:
    patch.setattr(Memory, "reset_cache", lambda self: None)


def one_token_too_many_counts_as_computed(patch: Patch) -> None:
    commit = EngineCore._commit

    def generous(self: Any, step: Any, drawn: Any) -> None:
        commit(self, step, drawn)
        for one in self.roster.running.values():
            one.num_computed = len(one.token_ids)

    patch.setattr(EngineCore, "_commit", generous)


def full_hit_leaves_nothing_to_compute(patch: Patch) -> None:
    """A prefix of all known tokens is adopted, and the validator does not object."""
    acquire = memory.StepKV.acquire

    def all_of_it(self: Any, sequence_id: int, key: CacheKey | None = None) -> int:
        return acquire(self, sequence_id, None if key is None else replace(key, limit=key.limit + 1))

    patch.setattr(memory.StepKV, "acquire", all_of_it)
    patch.setattr(planning, "refuse_bad_items", lambda plan, view, kv, adopted: (plan, []))


def budget_is_not_kept(patch: Patch) -> None:
    plan = PolicyScheduler.plan

    def lavish(self: Any, view: Any, budget: Any, kv: Any) -> Any:
        return plan(self, view, replace(budget, num_tokens=budget.num_tokens + 1), kv)

    patch.setattr(PolicyScheduler, "plan", lavish)
    patch.setattr(planning, "refuse_bad_items", lambda plan, view, kv, adopted: (plan, []))


def one_seat_too_many_is_given(patch: Patch) -> None:
    plan = PolicyScheduler.plan

    def lavish(self: Any, view: Any, budget: Any, kv: Any) -> Any:
        return plan(self, view, replace(budget, num_seats=budget.num_seats + 1), kv)

    patch.setattr(PolicyScheduler, "plan", lavish)
    patch.setattr(planning, "refuse_bad_items", lambda plan, view, kv, adopted: (plan, []))


def nobody_is_let_in(patch: Patch) -> None:
    patch.setattr(FcfsPolicy, "order_waiting", lambda self, view: ())


def paused_sequences_keep_their_blocks_for_ever(patch: Patch) -> None:
    patch.setattr(planner, "_reclaim", lambda draft, request: False)


def door_is_open_to_what_never_fits(patch: Patch) -> None:
    patch.setattr(admission, "_new_tokens", lambda request, parts, name: request.params.max_tokens or 1)


def queue_has_no_end(patch: Patch) -> None:
    patch.setattr(admission, "_check_queue", lambda request, parts, roster, name: None)


def cancelling_ends_one_lane(patch: Patch) -> None:
    """The request's other lanes go on, as if each had a caller of its own."""

    def end(self: Any, request_id: str, reason: Any, **details: Any) -> None:
        if (lanes := self.roster.requests.get(request_id)) is not None:
            self._finish_lane(lanes.live[0], reason, **details)

    patch.setattr(EngineCore, "_end", end)


def last_event_comes_twice(patch: Patch) -> None:
    deliver = EngineCore._deliver

    def twice(self: Any) -> Guarded[list[Event]]:
        events = yield from deliver(self)
        return events + [one for one in events if one.finish_reason is not None]

    patch.setattr(EngineCore, "_deliver", twice)


def drafters_are_not_told(patch: Patch) -> None:
    patch.setattr(EngineCore, "forget_drafts", lambda self, sequence: None)


def host_memory_is_not_given_back(patch: Patch) -> None:
    def keep(self: Any, sequence: Sequence) -> Any:
        saved, sequence.offloaded = sequence.offloaded, None
        return saved

    patch.setattr(Memory, "take_offloaded", keep)


def last_come_first_served(patch: Patch) -> None:
    order = FcfsPolicy.order_waiting
    patch.setattr(FcfsPolicy, "order_waiting", lambda self, view: list(order(self, view))[::-1])


def first_of_all_is_the_victim(patch: Patch) -> None:
    def blocked(self: Any, view: Any, request: Any, need: Any) -> Any:
        return Victims(tuple(one.sequence_id for one in view.running))

    patch.setattr(FcfsPolicy, "on_blocked", blocked)


def blocked_requests_are_passed(patch: Patch) -> None:
    patch.setattr(FcfsPolicy, "on_blocked", lambda self, view, request, need: Skip())


def draws_depend_on_the_neighbours(patch: Patch) -> None:
    def sample(self: Any, logits_RV: Any, rows: Any) -> list[int]:
        numbered = enumerate(zip(logits_RV.numpy(), rows, strict=True))
        return [draw(one, row.params.temperature or 1.0, row.seed, number, 0) for number, (one, row) in numbered]

    patch.setattr(TraceSampler, "sample", sample)


def preemption_drops_a_token(patch: Patch) -> None:
    preempt = Planning._preempt

    def drop(self: Any, sequence: Sequence, *arguments: Any) -> None:
        if sequence.output_token_ids:
            sequence.token_ids.pop()
            sequence.output_token_ids.pop()
        sequence.num_computed = sequence.num_sound = min(sequence.num_computed, len(sequence.token_ids) - 1)
        preempt(self, sequence, *arguments)

    patch.setattr(Planning, "_preempt", drop)


def drafts_are_taken_unseen(patch: Patch) -> None:
    draw_all = engine.Drawer.draw

    def believe(self: Any, logits_RV: Any, windows: Any) -> Any:
        results = yield from draw_all(self, logits_RV, windows)
        for window, result in zip(windows, results, strict=True):
            if window.drafts and result.token_ids:
                result.token_ids[0] = window.drafts[0]
        return results

    patch.setattr(engine.Drawer, "draw", believe)


def lanes_draw_alike(patch: Patch) -> None:
    make = admission.new_lane
    patch.setattr(engine.admission, "new_lane", lambda request, lane, parts, roster: make(request, 0, parts, roster))


def chance_has_no_seed(patch: Patch) -> None:
    for dice in ("_random", "_door"):
        patch.setattr(ChaosPolicy, dice, random.SystemRandom(), raising=False)
    patch.setattr(ChaosPolicy, "__init__", lambda self, config, context: None)


BUGS = (
    Bug("I1", released_block_is_lost, kvs=("paged",)),
    Bug("I1", ended_sequence_keeps_its_blocks),
    Bug("I2", fork_is_not_counted, kvs=("paged",)),
    Bug("I2", dropped_share_is_still_counted, kvs=("paged",)),
    Bug("I3", block_is_freed_twice, kvs=("paged",)),
    Bug("I4", shared_block_is_not_copied, kvs=("paged",)),
    Bug("I5", copy_is_never_made, kvs=("paged",)),
    Bug("I5", salts_share_a_namespace, kvs=CACHES),
    Bug("I5", restored_blocks_are_mixed_up, policies=("test:forced",)),
    Bug("I5", tier_brings_other_blocks, kvs=CACHES),
    Bug("I5", stale_prefixes_survive_a_reset, kvs=CACHES),
    Bug("I6", one_token_too_many_counts_as_computed),
    Bug("I6", full_hit_leaves_nothing_to_compute, kvs=CACHES, policies=("fcfs", "test:forced")),
    Bug("I7", budget_is_not_kept, policies=("fcfs", "fair")),
    Bug("I7", one_seat_too_many_is_given, policies=("fcfs", "fair")),
    Bug("I8", nobody_is_let_in, policies=("fcfs",)),
    Bug("I8", paused_sequences_keep_their_blocks_for_ever, policies=("test:chaos", "test:forced")),
    Bug("I9", door_is_open_to_what_never_fits),
    Bug("I9", queue_has_no_end),
    Bug("I10", cancelling_ends_one_lane),
    Bug("I10", last_event_comes_twice),
    Bug("I10", drafters_are_not_told),
    Bug("I10", host_memory_is_not_given_back, policies=("test:forced",)),
    Bug("I11", last_come_first_served, policies=("fcfs",)),
    Bug("I11", first_of_all_is_the_victim, policies=("fcfs",)),
    Bug("I11", blocked_requests_are_passed, policies=("fcfs",)),
    Bug("I12", draws_depend_on_the_neighbours),
    Bug("I12", preemption_drops_a_token, policies=("test:forced",)),
    Bug("I12", drafts_are_taken_unseen),
    Bug("I13", chance_has_no_seed, policies=("test:chaos",)),
)
