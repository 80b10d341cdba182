"""The KV manager with a hash-chained prefix cache: whole blocks are found by the hash of all tokens up to their end."""

from __future__ import annotations

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kv.prefix import PrefixKV, PrefixKVConfig
from pluglm_prefix_cache.hash_index import HashIndex


class HashPrefixKV(PrefixKV):
    """Paged KV memory whose whole blocks later sequences adopt, found by a keyed hash chained over the blocks."""

    interface_version = 2
    Config = PrefixKVConfig

    def __init__(self, config: PrefixKVConfig, context: BuildContext) -> None:
        super().__init__(config, context, "hash_prefix", HashIndex(config.block_size), keeps_tails=False)
