"""Batches for attention under test: random sequences cut into cached and new tokens, and their float64 answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.testing.batches import new_slots, slots_at
from pluglm.testing.stores import PlainStore

# S: tokens of one sequence, T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim, L: layers

STALE = 37.0  # what slots hold that no sequence of the batch has written


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Queries, keys and values of one whole sequence, for one layer."""

    q_SNH: torch.Tensor
    k_SKH: torch.Tensor
    v_SKH: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """lengths: (cached, new) tokens per sequence. blocks: physical block ids in the order they are handed out."""

    layer: LayerSpec
    texts: tuple[Text, ...]
    lengths: tuple[tuple[int, int], ...]
    block_size: int
    blocks: tuple[int, ...]

    def segments(self) -> tuple[Segment, ...]:
        start, taken, segments = 0, 0, []
        for index, (cached, new) in enumerate(self.lengths):
            num_blocks = -(-(cached + new) // self.block_size)
            segments.append(
                Segment(
                    sequence_id=index,
                    query_start=start,
                    num_query=new,
                    num_context=cached,
                    block_table=self.blocks[taken : taken + num_blocks],
                )
            )
            start, taken = start + new, taken + num_blocks
        return tuple(segments)


def random_text(
    layer: LayerSpec, length: int, seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> Text:
    """Normal entries; `size` multiplies queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, layer.num_heads, layer.head_dim, generator=generator) * size
    k = torch.randn(length, layer.num_kv_heads, layer.head_dim, generator=generator) * size
    v = torch.randn(length, layer.num_kv_heads, layer.head_dim, generator=generator)
    return Text(q_SNH=q.to(dtype), k_SKH=k.to(dtype), v_SKH=v.to(dtype))


def make_case(
    layer: LayerSpec,
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int = 4,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> Case:
    """Texts seeded by their index; blocks in ascending order, or in an order that no formula gives."""
    total = sum(-(-(cached + new) // block_size) for cached, new in lengths) + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist() if shuffled else range(total)
    texts = tuple(random_text(layer, sum(one), seed, dtype, size) for seed, one in enumerate(lengths))
    return Case(layer=layer, texts=texts, lengths=tuple(lengths), block_size=block_size, blocks=tuple(order))


def fresh_store(case: Case, spec: ModelSpec, device: str) -> PlainStore:
    """A store that holds the cached tokens of the case in every layer, and STALE elsewhere."""
    layout = KVLayout(num_blocks=len(case.blocks), block_size=case.block_size)
    store = PlainStore(layout, spec, case.texts[0].k_SKH.dtype, device, fill=STALE)
    for text, segment in zip(case.texts, case.segments(), strict=True):
        slots = slots_at(segment.block_table, range(segment.num_context), case.block_size)
        store.keys(case.layer.index)[slots] = text.k_SKH[: segment.num_context].to(device)
        store.values(case.layer.index)[slots] = text.v_SKH[: segment.num_context].to(device)
    return store


def new_rows(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_TNH, k_TKH and v_TKH of the new tokens, segment after segment."""
    parts = list(zip(case.texts, case.lengths, strict=True))
    q = torch.cat([text.q_SNH[cached : cached + new] for text, (cached, new) in parts])
    k = torch.cat([text.k_SKH[cached : cached + new] for text, (cached, new) in parts])
    v = torch.cat([text.v_SKH[cached : cached + new] for text, (cached, new) in parts])
    return q.to(device), k.to(device), v.to(device)


def batch_of(case: Case, device: str) -> AttentionBatch:
    slots = [slot for segment in case.segments() for slot in new_slots(segment, case.block_size)]
    slots_T = torch.tensor(slots, dtype=torch.int64, device=device)
    return AttentionBatch(segments=case.segments(), slots_T=slots_T, block_size=case.block_size)


def run_case(attention: Attention, case: Case, store: PlainStore, device: str) -> torch.Tensor:
    """out_TNH, on the CPU."""
    with torch.inference_mode():
        plan = attention.plan(batch_of(case, device))
        return attention.run(case.layer, *new_rows(case, device), plan, store).cpu()


def reference(case: Case) -> torch.Tensor:
    """out_TNH float64, from the whole texts and the definition: no cache, no blocks, no batch."""
    outputs: list[torch.Tensor] = []
    for text, (cached, new) in zip(case.texts, case.lengths, strict=True):
        outputs.extend(_reference_row(case.layer, text, position) for position in range(cached, cached + new))
    return torch.stack(outputs)


def _reference_row(layer: LayerSpec, text: Text, position: int) -> torch.Tensor:
    first = 0 if layer.window is None else max(0, position - layer.window + 1)
    group = layer.num_heads // layer.num_kv_heads
    rows = []
    for head in range(layer.num_heads):
        keys_SH = text.k_SKH[first : position + 1, head // group].double()
        scores_S = keys_SH @ text.q_SNH[position, head].double() * layer.scale
        if layer.soft_cap is not None:
            scores_S = layer.soft_cap * torch.tanh(scores_S / layer.soft_cap)
        rows.append(torch.softmax(scores_S, 0) @ text.v_SKH[first : position + 1, head // group].double())
    return torch.stack(rows)
