"""Batches of which everything is stored: what a kernel is given, and what it should answer in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, LaunchConfig, LaunchTable

# Lengths a few times as large fill several tiles, and the interpreter takes some 20 ms for each.
SMALL_TILES: LaunchTable = dict.fromkeys(DEFAULT_TABLE, LaunchConfig(16, 16, 4, 2))

# float32: sums of tens of products of unit normals. float16: one rounding (2**-11) of weights, and of results up to 4.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@dataclass(frozen=True)
class Stored:
    """q_TNH of all segments; keys and values [slots, K, H], NaN in each slot that holds nothing."""

    layer: LayerSpec
    sequences: list[Any]
    segments: tuple[Segment, ...]
    block_size: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    reference: Callable[[LayerSpec, Any], torch.Tensor]

    def slots(self, segment: Segment) -> torch.Tensor:
        return torch.tensor(segment.slots(self.block_size), dtype=torch.int64)

    def expected(self) -> torch.Tensor:
        """out_TNH float64."""
        pairs = zip(self.segments, self.sequences, strict=True)
        return torch.cat([self.reference(self.layer, tokens)[segment.num_context :] for segment, tokens in pairs])

    def check(self, out_TNH: torch.Tensor, tolerance: float | None = None) -> None:
        assert out_TNH.dtype == self.q.dtype
        allowed = TOLERANCE[self.q.dtype] if tolerance is None else tolerance
        torch.testing.assert_close(out_TNH.double(), self.expected(), rtol=0, atol=allowed)


@pytest.fixture
def small_tiles() -> LaunchTable:
    return SMALL_TILES


@pytest.fixture
def store(world: Any) -> Callable[..., Stored]:
    """(layer, [(num_context, num_query), ...], ...) -> a batch of segments with these sizes."""

    def make(
        layer: LayerSpec,
        sizes: Sequence[tuple[int, int]],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        scattered: bool = True,
    ) -> Stored:
        sequences = [world.tokens(layer, sum(size), seed, dtype) for seed, size in enumerate(sizes)]
        counts = [-(-len(tokens) // block_size) for tokens in sequences]
        blocks = list(range(sum(counts)))
        if scattered:
            blocks = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(5)).tolist()
        segments, row = [], 0
        for number, ((context, query), count) in enumerate(zip(sizes, counts, strict=True)):
            table, blocks = tuple(blocks[:count]), blocks[count:]
            segments.append(
                Segment(sequence_id=number, query_start=row, num_query=query, num_context=context, block_table=table)
            )
            row += query
        keys = torch.full((sum(counts) * block_size, layer.num_kv_heads, layer.head_dim), float("nan"), dtype=dtype)
        q = torch.cat([tokens.q[context:] for tokens, (context, _) in zip(sequences, sizes, strict=True)])
        stored = Stored(layer, sequences, tuple(segments), block_size, q, keys, keys.clone(), world.reference)
        for segment, tokens in zip(stored.segments, sequences, strict=True):
            stored.keys[stored.slots(segment)] = tokens.k
            stored.values[stored.slots(segment)] = tokens.v
        return stored

    return make
