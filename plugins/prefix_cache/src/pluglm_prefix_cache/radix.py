"""The KV manager with a radix tree as prefix cache: a match may end at any token, also inside a block."""

from __future__ import annotations

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kv.prefix import PrefixKV, PrefixKVConfig
from pluglm_prefix_cache.radix_tree import RadixTree


class RadixKV(PrefixKV):
    """Paged KV memory from which later sequences adopt the longest common prefix, token by token.

    A block that is adopted in part is copied before the adopter writes. Of a sequence that runs, whole blocks can be
    adopted; its partly filled last block joins them when it is released.
    """

    interface_version = 2
    Config = PrefixKVConfig

    def __init__(self, config: PrefixKVConfig, context: BuildContext) -> None:
        super().__init__(config, context, "radix", RadixTree(config.block_size), keeps_tails=True)
