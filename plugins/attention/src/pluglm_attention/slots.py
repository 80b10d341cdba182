"""From block tables to storage slots. Knows no tensor but the index tensors that it makes."""

from __future__ import annotations

from itertools import pairwise

import torch

from pluglm.kernel.core import Segment

# S: keys of one segment


def first_slot_if_consecutive(segment: Segment, block_size: int, first_key: int = 0) -> int | None:
    """The slot of position first_key if the keys from there on lie side by side in storage, else None."""
    table = segment.block_table[first_key // block_size : -(-segment.num_keys // block_size)]
    if any(after != before + 1 for before, after in pairwise(table)):
        return None
    return table[0] * block_size + first_key % block_size


def key_slots(segment: Segment, block_size: int, device: torch.device, first_key: int = 0) -> torch.Tensor:
    """slots_S int64 of positions first_key .. num_keys - 1, in order."""
    first_block = first_key // block_size
    table = torch.tensor(segment.block_table[first_block : -(-segment.num_keys // block_size)], device=device)
    slots = (table[:, None] * block_size + torch.arange(block_size, device=device)).flatten()
    return slots[first_key - first_block * block_size : segment.num_keys - first_block * block_size]


def first_visible_key(num_context: int, window: int | None) -> int:
    """The first position that any query from position num_context on can see."""
    return 0 if window is None else max(0, num_context - window + 1)
