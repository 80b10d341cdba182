"""The contiguous KV manager: one region per sequence, long enough for the longest one. Knows no tensor."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import WHOLE_REGIONS, KVLayout
from pluglm.kv.manager import BlockManager, fitting_blocks


class ContiguousKVConfig(ComponentConfig):
    """num_regions: sequences that can hold KV at once, None for as many as seats and budget allow.

    region_tokens: tokens of a region, None for the run's max_model_len.
    """

    num_regions: int | None = Field(default=None, ge=1)
    region_tokens: int | None = Field(default=None, ge=1)


class ContiguousKV(BlockManager):
    """KV memory in one region per sequence: its keys lie side by side, and a short sequence wastes the rest.

    A fork shares the region until one side extends, which then copies all of it.
    """

    interface_version = 2
    Config = ContiguousKVConfig

    def __init__(self, config: ContiguousKVConfig, context: BuildContext) -> None:
        region_tokens = config.region_tokens or context.max_model_len
        num_regions = fitting_blocks(
            "contiguous",
            "region",
            config.num_regions,
            context.max_num_seqs,
            context.bytes_per_token * region_tokens,
            context.kv_bytes,
        )
        super().__init__(KVLayout(num_blocks=num_regions, block_size=region_tokens), max_blocks_per_sequence=1)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({WHOLE_REGIONS}))
