"""Into how many parts a decode batch's keys are split. Imports no triton."""

from __future__ import annotations

# Shorter parts cost more in the sum over parts than they save.
LEAST_KEYS = 128
MAX_SPLITS = 128


def choose_splits(num_programs: int, max_keys: int, num_processors: int) -> int:
    """1 if one program a (query tile, kv head) occupies every processor; else enough parts for two programs on each,
    of at least LEAST_KEYS keys and at most MAX_SPLITS.

    The method is Flash-Decoding (Dao et al., 2023). It depends on the batch, so bits of a row do too.
    """
    if num_programs == 0 or num_programs >= num_processors:
        return 1
    wanted = -(-2 * num_processors // num_programs)
    return max(1, min(wanted, max_keys // LEAST_KEYS, MAX_SPLITS))
