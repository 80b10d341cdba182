"""The paged KV manager: small blocks from one pool, a table of them per sequence. Knows no tensor.

The block tables and the copy on write are those of PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kv.manager import BlockManager, fitting_blocks


class PagedKVConfig(ComponentConfig):
    """block_size: tokens of a block. num_blocks: None fills the KV budget, up to what the seats could ever use."""

    block_size: int = Field(default=16, ge=1)
    num_blocks: int | None = Field(default=None, ge=1)


class PagedKV(BlockManager):
    """KV memory in small blocks: any free one serves any sequence, so only a sequence's last block is partly unused."""

    interface_version = 2
    Config = PagedKVConfig

    def __init__(self, config: PagedKVConfig, context: BuildContext, name: str = "paged") -> None:
        per_sequence = -(-context.max_model_len // config.block_size)
        num_blocks = fitting_blocks(
            name,
            "block",
            config.num_blocks,
            per_sequence * context.max_num_seqs,
            context.bytes_per_token * config.block_size,
            context.kv_bytes,
        )
        super().__init__(KVLayout(num_blocks=num_blocks, block_size=config.block_size), num_blocks)
