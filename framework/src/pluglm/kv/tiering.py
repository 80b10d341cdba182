"""What the engine calls to keep evicted KV beside the device and to bring it back. Knows the order of things only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluglm.kernel.engine import EngineCore
from pluglm.kernel.guard import Guard
from pluglm.kernel.interfaces.kv_tier import KVTier
from pluglm.kv.tier_costs import Costs
from pluglm.kv.tier_loads import TierLoads
from pluglm.kv.tier_set import TierCounts, TierSet
from pluglm.kv.tier_stores import TierStores


class KVTiers:
    """Tiers in the kernel's parts, over a KV manager with an EvictionLog. See decision 14.

    timeout_s: of the loads of a sequence together, and of a store.
    """

    def __init__(self, tiers: Mapping[str, KVTier], guard: Guard, timeout_s: float) -> None:
        self._tiers, self._costs = TierSet(tiers, guard), Costs()
        self._stores = TierStores(self._tiers, timeout_s)
        self._loads = TierLoads(self._tiers, self._costs, timeout_s)
        self._committed_s = 0.0

    @property
    def counts(self) -> Mapping[str, TierCounts]:
        return self._tiers.counts

    def before_plan(self, engine: EngineCore) -> None:
        self._stores.settle(engine)
        if (cache := engine.parts.prefix_cache) is not None:
            self._loads.advance(engine, cache)

    def after_commit(self, engine: EngineCore) -> None:
        cache = engine.parts.prefix_cache
        manager: Any = engine.kv
        if self._tiers.tiers and cache is not None:
            evicted = engine.attempt("kv", (), manager.take_evicted)
            if evicted is None:  # a later call might name blocks that were written over by then
                self._tiers.tiers.clear()
            elif evicted:
                self._stores.store(engine, cache, evicted)
        self._committed_s = engine.now()

    def after_step(self, engine: EngineCore, num_tokens: list[int]) -> None:
        self._loads.was_idle = not num_tokens
        if num_tokens:
            self._costs.computed(num_tokens, engine.kv.layout.block_size, engine.now() - self._committed_s)

    def reset(self, engine: EngineCore) -> None:
        """Forget what was kept, and what is on its way."""
        self._stores.forget()
        self._loads.forget(engine)
        self._tiers.for_each(lambda tier: tier.clear())

    def close(self, engine: EngineCore) -> None:
        self._loads.forget(engine)
        self._tiers.for_each(lambda tier: tier.close())
