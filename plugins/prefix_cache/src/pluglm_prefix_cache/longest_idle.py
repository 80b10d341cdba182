"""Longest without a holder first. Knows the times of one block, no other block and no order."""

from __future__ import annotations

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction


class LongestIdleEviction(Eviction):
    """Evicts what no sequence has held for the longest time."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        pass

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float(block.idle_since),)
