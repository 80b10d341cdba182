"""Least frequently used first. Knows the hits and times of one block, no other block and no order."""

from __future__ import annotations

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.eviction import CachedBlock, Eviction


class LfuEviction(Eviction):
    """Evicts what was adopted least often; among equals what was used the longest time ago."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        pass

    def rank(self, block: CachedBlock) -> tuple[float, ...]:
        return (float(block.num_hits), float(block.used_at))
