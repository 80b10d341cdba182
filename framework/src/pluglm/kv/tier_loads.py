"""Brings blocks of waiting sequences back from the tiers into the prefix cache. What does not come is recomputed."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from pluglm.kernel.core import CacheKey, Sequence
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.kv import PrefixCache
from pluglm.kernel.interfaces.kv_tier import LeaseState
from pluglm.kv.cache_access import CacheAccess
from pluglm.kv.tier_costs import Costs
from pluglm.kv.tier_set import TierLease, TierSet, block_keys

logger = logging.getLogger("pluglm")
MOST_TOKENS = 4096  # that are asked for at once for one sequence, and about what a step puts into the cache
SLICES = 50  # of the timeout, that the engine waits at once when it has nothing else to do


@dataclass(slots=True)
class _Load:
    """One sequence's turn at the tiers. start: tokens before those on their way; key.limit: where these end.

    waited_s: time spent waiting, which a virtual clock does not show. is_over: nothing more is asked for.
    """

    started_s: float
    key: CacheKey | None = None
    start: int = 0
    leases: list[TierLease] = field(default_factory=list)
    waited_s: float = 0.0
    is_over: bool = False


class TierLoads:
    """timeout_s: of all loads of a sequence together, from the first on. was_idle: the last step computed nothing."""

    def __init__(self, tiers: TierSet, costs: Costs, timeout_s: float) -> None:
        self._tiers, self._costs, self._timeout_s = tiers, costs, timeout_s
        self._loads: dict[int, _Load] = {}  # by sequence id, while it waits
        self._tokens_left = 0  # of this step
        self.was_idle = False

    def advance(self, engine: EngineCore, cache: PrefixCache) -> None:
        """Take what has arrived, ask for more, and hold out those whose KV is on its way."""
        roster, self._tokens_left = engine.roster, MOST_TOKENS
        for gone in self._loads.keys() - roster.waiting.keys():
            self._tiers.cancel(self._loads.pop(gone).leases)
        fresh = (one for one in roster.waiting.values() if _may_adopt(one))
        head = heapq.nsmallest(
            engine.parts.budget.num_seats, fresh, key=lambda one: (one.request.arrival_s, one.sequence_id)
        )
        for sequence in dict.fromkeys([*head, *(roster.waiting[one] for one in self._held())]):
            self._advance(engine, cache, sequence)
        held = self._held()
        startable = {one for one, sequence in roster.waiting.items() if sequence.parked is None}
        if held and (self.was_idle or (not roster.running and held >= startable)):
            self._wait(engine, cache, [roster.waiting[one] for one in held])
            held = self._held()
        roster.held_out = held

    def forget(self, engine: EngineCore) -> None:
        """Nothing that is on its way is wanted any more."""
        self._tiers.cancel([one for load in self._loads.values() for one in load.leases])
        self._loads = {}
        engine.roster.held_out = set()

    def _held(self) -> set[int]:
        return {one for one, load in self._loads.items() if not load.is_over}

    def _advance(self, engine: EngineCore, cache: PrefixCache, sequence: Sequence) -> None:
        load = self._loads.setdefault(sequence.sequence_id, _Load(engine.now()))
        while not load.is_over and self._tokens_left > 0:
            if not load.leases:
                self._ask(engine, cache, sequence, load)
            if load.leases and not self._take(engine, cache, sequence, load):
                return

    def _ask(self, engine: EngineCore, cache: PrefixCache, sequence: Sequence, load: _Load) -> None:
        """Lease the blocks that come next in the sequence, as far as a tier has them and loading pays."""
        size, limit = engine.kv.layout.block_size, len(sequence.token_ids) - 1
        load.is_over = True
        try:
            first = CacheAccess(engine, cache).probe(CacheKey(sequence.namespace, sequence.token_ids, limit)) // size
        except ComponentFailure:
            return
        if load.key is not None and first * size <= load.start:
            return  # what was loaded is gone already
        known = tuple(sequence.token_ids[: min(limit, first * size + max(size, MOST_TOKENS))])
        keys = list(block_keys(sequence.namespace, known, size))[first:]
        load.leases = self._tiers.ask(lambda: self._leases(keys, known, size)) or [] if keys else []
        load.start, load.is_over = first * size, not load.leases
        load.key = CacheKey(sequence.namespace, known, (first + len(load.leases)) * size)

    def _leases(self, keys: list[bytes], token_ids: tuple[int, ...], size: int) -> list[TierLease]:
        """keys: of the last whole blocks of token_ids, as many as there are keys."""
        first, taken = len(token_ids) // size - len(keys), dict[str, int]()
        leases: list[TierLease] = []
        for number, key in enumerate(keys, first):
            if (name := self._worth(key, taken)) is None:
                break
            taken[name] = taken.get(name, 0) + 1
            lease = self._tiers.tiers[name].load(key, token_ids[: (number + 1) * size])
            leases.append(self._tiers.leased(name, lease))
        return leases

    def _worth(self, key: bytes, taken: dict[str, int]) -> str | None:
        """The first tier that has the block and is worth asking for one more."""
        for name, tier in self._tiers.tiers.items():
            most = self._costs.most_blocks(name)
            is_tried = bool(most) and taken.get(name, 0) >= (most or 0)
            if is_tried or not tier.has(key):
                continue
            if most != 0:
                return name
            self._costs.lost(name)
            self._tiers.counts[name].num_slow += 1
        return None

    def _wait(self, engine: EngineCore, cache: PrefixCache, held: list[Sequence]) -> None:
        """There is nothing else to do: wait a little for the last block of a load, then look again."""
        for sequence in held:
            load, timeout_s = self._loads[sequence.sequence_id], self._timeout_s / SLICES
            if load.leases:
                if self._tiers.states(load.leases, timeout_s)[-1] == "pending":
                    for one in held:  # it passes for all of them
                        self._loads[one.sequence_id].waited_s += timeout_s
                self._advance(engine, cache, sequence)
                return

    def _take(self, engine: EngineCore, cache: PrefixCache, sequence: Sequence, load: _Load) -> bool:
        """Put what came into the cache, or give up at the deadline; False while that is to be waited for."""
        states = self._tiers.states(load.leases)
        is_late = max(engine.now() - load.started_s, load.waited_s) >= self._timeout_s
        if "pending" in states and "failed" not in states and not is_late:
            return False
        num_ok = next((number for number, state in enumerate(states) if state != "ok"), len(states))
        self._count_lost(load.leases[num_ok:], states[num_ok:], is_late)
        arrived, lost = load.leases[:num_ok], load.leases[num_ok:]
        self._tiers.cancel(lost)
        load.leases, load.is_over = [], bool(lost)
        if arrived and load.key is not None and not self._fill(engine, cache, sequence, load.key, load.start, arrived):
            load.is_over = True
        return True

    def _count_lost(self, leases: list[TierLease], states: list[LeaseState], is_late: bool) -> None:
        for one, state in zip(leases, states, strict=True):
            self._tiers.counts[one.tier].num_failed += state == "failed"
            self._tiers.counts[one.tier].num_late += state == "pending" and is_late

    def _fill(
        self,
        engine: EngineCore,
        cache: PrefixCache,
        sequence: Sequence,
        key: CacheKey,
        start: int,
        arrived: Items[TierLease],
    ) -> bool:
        """Into the cache with it; False when not all of it got there."""
        access, size, started_s = CacheAccess(engine, cache), engine.kv.layout.block_size, engine.now()
        data = [one.lease.data for one in arrived]
        sound = next((number for number, one in enumerate(data) if not _fits(one, access.shapes(size))), len(data))
        for one in arrived[sound : sound + 1]:
            self._tiers.counts[one.tier].num_failed += 1
            logger.warning("kv tier '%s' gave tensors of other types or shapes than it was given", one.tier)
        if not sound:
            return False
        joined = [torch.cat(one) for one in zip(*data[:sound], strict=True)]
        try:
            reason = access.fill(CacheKey(key.namespace, key.token_ids, start + sound * size), joined, start)
        except ComponentFailure as failure:
            reason = str(failure)
        if reason:
            logger.debug("KV from a tier was dropped: %s", reason)
            return False
        self._count(sequence, arrived[:sound], size, engine.now() - started_s)
        return sound == len(arrived)

    def _count(self, sequence: Sequence, arrived: Items[TierLease], size: int, fill_s: float) -> None:
        """A load costs what its tier says, and its share of the time to fill the cache."""
        sequence.num_loaded += len(arrived) * size
        self._tokens_left -= len(arrived) * size
        for one in arrived:
            self._tiers.counts[one.tier].num_loaded += 1
            self._costs.loaded(one.tier, size, one.lease.seconds + fill_s / len(arrived))


def _fits(data: Items[torch.Tensor], shapes: list[tuple[torch.dtype, tuple[int, ...]]]) -> bool:
    """Nothing of another form may get into the store."""
    tensors = [one for one in data if isinstance(one, torch.Tensor)]
    return len(tensors) == len(data) and [(one.dtype, tuple(one.shape)) for one in tensors] == shapes


def _may_adopt(sequence: Sequence) -> bool:
    """As the engine decides it: it has no KV, and more than the one token that is always computed.

    A lane of a search that waits for the others has nothing to compute.
    """
    is_without = not sequence.num_computed and not sequence.holds_kv and sequence.parked is None
    return is_without and len(sequence.token_ids) > 1
