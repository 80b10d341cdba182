"""A world without a model: random q, k, v of whole sequences, fed to an attention step by step through a KV store."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kv.store import TensorKVStore

sys.path.append(str(Path(__file__).parent))  # helper modules of this folder, whose names are unique in the repository

# P: tokens of one sequence, N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True)
class Tokens:
    """q_PNH, k_PKH, v_PKH of one whole sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return self.q.shape[0]


class AttentionWorld:
    """Builds attentions and runs them. Storage starts as NaN, so reading a slot that nobody wrote spoils the output."""

    def layer(self, heads: int, kv_heads: int, head_dim: int, **more: Any) -> LayerSpec:
        scale = head_dim**-0.5
        return LayerSpec(index=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=scale, **more)

    def build(
        self, kind: type[Any], layer: LayerSpec, dtype: str = "float32", deterministic: bool = False, tools: Any = None
    ) -> Attention:
        spec = ModelSpec(family="llama", hidden_size=64, vocab_size=32, max_position=4096, layers=(layer,))
        # What an attention does not read is left None, so that a new field of the context is no change here.
        fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BuildContext))
        fields.update(spec=spec, device="cpu", dtype=dtype, deterministic=deterministic)
        fields.update(kernels=KernelLog(), tools=tools)
        built: Attention = kind(kind.Config(), BuildContext(**fields))
        return built

    def tokens(self, layer: LayerSpec, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        parts = [torch.randn((count, heads, layer.head_dim), generator=generator).to(dtype) for heads in sizes]
        return Tokens(*parts)

    def run(
        self,
        attention: Attention,
        layer: LayerSpec,
        sequences: Sequence[Tokens],
        steps: Sequence[Sequence[tuple[int, int]]],
        block_size: int,
        scattered: bool = True,
    ) -> list[torch.Tensor]:
        """Each step computes (sequence, number of tokens) pairs; returns out_PNH of every sequence."""
        tables = block_tables([len(s) for s in sequences], block_size, scattered)
        layout = KVLayout(num_blocks=sum(len(table) for table in tables), block_size=block_size)
        spec = ModelSpec(family="llama", hidden_size=64, vocab_size=32, max_position=4096, layers=(layer,))
        store = TensorKVStore(layout, spec, "cpu", sequences[0].k.dtype)
        store.keys(0).fill_(float("nan"))
        store.values(0).fill_(float("nan"))
        outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        for step in steps:
            out_TNH, segments = self._step(attention, layer, sequences, step, (tables, done, store))
            for (sequence, count), segment in zip(step, segments, strict=True):
                outputs[sequence].append(out_TNH[segment.query_start : segment.query_start + count])
                done[sequence] += count
        return [torch.cat(parts) for parts in outputs]

    def _step(
        self,
        attention: Attention,
        layer: LayerSpec,
        sequences: Sequence[Tokens],
        step: Sequence[tuple[int, int]],
        state: tuple[list[list[int]], list[int], TensorKVStore],
    ) -> tuple[torch.Tensor, list[Segment]]:
        tables, done, store = state
        block_size = store.layout.block_size
        segments: list[Segment] = []
        slots: list[int] = []
        for sequence, count in step:
            first = done[sequence]
            table = tuple(tables[sequence][: -(-(first + count) // block_size)])
            slots += [table[p // block_size] * block_size + p % block_size for p in range(first, first + count)]
            start = segments[-1].query_start + segments[-1].num_query if segments else 0
            segments.append(
                Segment(sequence_id=sequence, query_start=start, num_query=count, num_context=first, block_table=table)
            )
        q, k, v = (
            torch.cat([getattr(sequences[s], name)[done[s] : done[s] + count] for s, count in step]) for name in "qkv"
        )
        batch = AttentionBatch(segments=tuple(segments), slots_T=torch.tensor(slots), block_size=block_size)
        with torch.inference_mode():
            return attention.run(layer, q, k, v, attention.plan(batch), store), segments

    def reference(self, layer: LayerSpec, tokens: Tokens) -> torch.Tensor:
        """out_PNH float64, row by row and head by head from the formula in the contract of Attention."""
        q, k, v = tokens.q.double(), tokens.k.double(), tokens.v.double()
        group = layer.num_heads // layer.num_kv_heads
        out = torch.empty_like(q)
        for p in range(len(tokens)):
            first = 0 if layer.window is None else max(0, p - layer.window + 1)
            for n in range(layer.num_heads):
                scores = (k[first : p + 1, n // group] @ q[p, n]) * layer.scale
                if layer.soft_cap is not None:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                out[p, n] = torch.softmax(scores, 0) @ v[first : p + 1, n // group]
        return out


def block_tables(lengths: Sequence[int], block_size: int, scattered: bool) -> list[list[int]]:
    """Blocks for each sequence: in order, or a fixed shuffle over all of them."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = list(range(sum(counts)))
    if scattered:
        blocks = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(5)).tolist()
    taken = iter(blocks)
    return [[next(taken) for _ in range(count)] for count in counts]


@pytest.fixture(scope="session")
def world() -> AttentionWorld:
    return AttentionWorld()


@pytest.fixture
def threads() -> Any:
    """Sets torch's thread count for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
