"""A sample of attention shapes that covers every pair of values, and the exact answers in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention_cases import Case, make_case

# (cached, new) tokens of each sequence; a sequence may have no rows in the batch.
BATCHES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "first token": ((0, 1),),
    "prompt": ((0, 37),),
    "odd tails": ((0, 129), (0, 1), (0, 67)),
    "prefix": ((127, 66),),
    "decode": ((0, 1), (63, 1), (300, 1), (64, 1)),
    "verify": ((40, 5), (7, 3), (259, 16), (12, 2)),
    "mixed": ((0, 70), (130, 1), (64, 1), (250, 9), (0, 1)),
    "no rows": ((5, 0), (0, 3), (12, 0), (0, 0), (20, 1)),
    "long decode": ((4096, 1), (5, 1)),
    "long chunk": ((4017, 80),),
}
FACTORS: Mapping[str, Sequence[Any]] = {
    "batch": tuple(BATCHES),
    "heads": ((1, 1), (2, 1), (8, 1), (9, 3), (32, 4), (32, 32)),  # query heads, kv heads
    "head_dim": (64, 80, 128, 256),
    "window": (None, 1, 17, 64, 1000),
    "soft_cap": (None, 1.5),
    "block_size": (1, 5, 16, 64, 256),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}


def covering_sample() -> list[dict[str, Any]]:
    """Few rows in which every value of each factor meets every value of each other one; always the same ones."""
    names = list(FACTORS)
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(FACTORS[names[a]]))
        for j in range(len(FACTORS[names[b]]))
    }
    rows: list[dict[str, Any]] = []
    while uncovered:
        chosen = dict(min(uncovered))
        for factor in range(len(names)):
            if factor not in chosen:
                chosen[factor] = max(range(len(FACTORS[names[factor]])), key=_gain(chosen, factor, uncovered))
        uncovered -= set(itertools.combinations(sorted(chosen.items()), 2))
        rows.append({name: FACTORS[name][chosen[factor]] for factor, name in enumerate(names)})
    return rows


def _gain(chosen: dict[int, int], factor: int, uncovered: set[Any]) -> Any:
    def gain(value: int) -> int:
        return sum(tuple(sorted([one, (factor, value)])) in uncovered for one in chosen.items())

    return gain


def case_of(row: Mapping[str, Any]) -> Case:
    """Texts of unit variance, in blocks that lie anywhere."""
    num_heads, num_kv_heads = row["heads"]
    layer = LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=row["head_dim"],
        scale=row["head_dim"] ** -0.5,
        window=row["window"],
        soft_cap=row["soft_cap"],
    )
    lengths = BATCHES[row["batch"]]
    return make_case(layer, lengths, block_size=row["block_size"], shuffled=True, dtype=row["dtype"])


def exact(case: Case) -> torch.Tensor:
    """out_TNH float64: softmax(mask(cap(q k' * scale))) v, a few hundred rows of one head at a time."""
    layer = case.layer
    group = layer.num_heads // layer.num_kv_heads
    outputs = []
    for text, (cached, new) in zip(case.texts, case.lengths, strict=True):
        out = torch.empty((new, layer.num_heads, layer.head_dim), dtype=torch.float64)
        for first, head in itertools.product(range(0, new, 256), range(layer.num_heads)):
            query = torch.arange(first, min(first + 256, new))
            distance = (cached + query)[:, None] - torch.arange(cached + new)[None, :]
            seen = (distance >= 0) & (distance < (layer.window or cached + new + 1))
            scores = text.q_SNH[cached + query, head].double() @ text.k_SKH[:, head // group].double().T * layer.scale
            if layer.soft_cap is not None:
                scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=1)
            out[query, head] = weights @ text.v_SKH[:, head // group].double()
        outputs.append(out)
    return torch.cat(outputs)
