"""Keeps evicted blocks in the tiers: copied to the host before anything is written over them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.kv import EvictedBlock, PrefixCache
from pluglm.kv.cache_access import CacheAccess
from pluglm.kv.tier_set import TierLease, TierSet, block_keys

logger = logging.getLogger("pluglm")
MOST_PENDING = 256  # blocks on their way into tiers; further ones are not kept
_Wanted = list[tuple[EvictedBlock, bytes, list[str]]]  # with the block's key and the tiers that are to store it


class TierStores:
    """timeout_s: after which a store counts as late, and is given up."""

    def __init__(self, tiers: TierSet, timeout_s: float) -> None:
        self._tiers, self._timeout_s = tiers, timeout_s
        self._pending: list[tuple[TierLease, float]] = []  # with its deadline

    def store(self, engine: EngineCore, cache: PrefixCache, evicted: Sequence[EvictedBlock]) -> None:
        """Every block into every tier that lacks it."""
        wanted = self._tiers.ask(lambda: self._wanted(evicted, engine.kv.layout.block_size))
        if not wanted:
            return
        try:
            data = CacheAccess(engine, cache).read_blocks([one.block for one, _, _ in wanted])
        except ComponentFailure as failure:
            logger.warning("%s; evicted blocks are not kept", failure)
            return
        deadline_s = engine.now() + self._timeout_s
        self._tiers.ask(lambda: self._store(wanted, data, deadline_s))
        self.settle(engine)

    def _wanted(self, evicted: Sequence[EvictedBlock], block_size: int) -> _Wanted:
        wanted, room = _Wanted(), MOST_PENDING - len(self._pending)
        for one in evicted:
            *_, key = block_keys(one.namespace, one.token_ids, block_size)
            lacking = [name for name, tier in self._tiers.tiers.items() if not tier.has(key)]
            if 0 < len(lacking) <= room:
                room -= len(lacking)
                wanted.append((one, key, lacking))
        return wanted

    def _store(self, wanted: _Wanted, data: list[list[torch.Tensor]], deadline_s: float) -> None:
        for (one, key, lacking), tensors in zip(wanted, data, strict=True):
            for name in lacking:
                lease = self._tiers.tiers[name].store(key, one.token_ids, tensors)
                self._pending.append((self._tiers.leased(name, lease), deadline_s))

    def settle(self, engine: EngineCore) -> None:
        """Count what has arrived, and give up what is late."""
        pending, now_s, late = self._pending, engine.now(), list[TierLease]()
        self._pending = []
        for (one, deadline_s), state in zip(pending, self._tiers.states([one for one, _ in pending]), strict=True):
            counts = self._tiers.counts[one.tier]
            counts.num_stored += state == "ok"
            counts.num_failed += state == "failed"
            if state == "pending" and now_s > deadline_s:
                counts.num_late += 1
                late.append(one)
            elif state == "pending":
                self._pending.append((one, deadline_s))
        self._tiers.cancel(late)

    def forget(self) -> None:
        """Nothing that is on its way is wanted any more."""
        self._tiers.cancel([one for one, _ in self._pending])
        self._pending = []
