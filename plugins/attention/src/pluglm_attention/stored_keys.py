"""Where the keys of one sequence lie in the KV store, and how to read some of them. Knows no scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm_attention.rows import Rows
from pluglm_attention.slots import first_slot_if_consecutive, key_slots

# S: keys that are read, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """The keys of one segment from position first_key on: in consecutive slots, or at `slots`, int64 [all of them]."""

    first_key: int
    first_slot: int
    slots: torch.Tensor | None

    def read(self, stored: Rows, start: int, stop: int) -> torch.Tensor:
        """[S, K, H] of positions start .. stop: of a tensor a view where they lie side by side, else a copy."""
        if self.slots is None:
            return stored.narrow(0, self.first_slot + start - self.first_key, stop - start)
        return stored.index_select(0, self.slots[start - self.first_key : stop - self.first_key])


def stored_keys(segment: Segment, block_size: int, device: torch.device, first_key: int) -> StoredKeys:
    first_slot = first_slot_if_consecutive(segment, block_size, first_key)
    if first_slot is not None:
        return StoredKeys(first_key, first_slot, None)
    return StoredKeys(first_key, 0, key_slots(segment, block_size, device, first_key))
