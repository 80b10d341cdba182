"""A float64 oracle of the chain for one row, written from the definitions with numpy and no shared code.

Definitions: the papers and the API reference that the steps' modules name, in the order of DEFAULT_STEPS; ties by id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow

Row = NDArray[np.float64]


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def ranking(logits: Row) -> list[int]:
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def penalised(logits: Row, row: SampleRow) -> Row:
    result = logits.astype(np.float64).copy()
    for token_id in set(row.prompt_token_ids) | set(row.output_token_ids):
        factor = row.params.repetition_penalty
        result[token_id] = result[token_id] / factor if result[token_id] > 0 else result[token_id] * factor
    for token_id in set(row.output_token_ids):
        result[token_id] -= row.params.frequency_penalty * row.output_token_ids.count(token_id)
        result[token_id] -= row.params.presence_penalty
    return result


def truncated(logits: Row, row: SampleRow) -> tuple[Row, float]:
    """(probabilities, smallest distance of any threshold from the value it is compared with)."""
    margin = np.inf
    kept = np.isfinite(logits)
    current = logits.copy()
    if row.params.top_k > 0:
        order = [token_id for token_id in ranking(current) if kept[token_id]]
        for token_id in order[row.params.top_k :]:
            current[token_id] = -np.inf
    if row.params.top_p < 1:
        probs, mass, keep = softmax(current), 0.0, []
        for token_id in ranking(current):
            keep.append(token_id)
            mass += probs[token_id]
            margin = min(margin, abs(mass - row.params.top_p))
            if mass >= row.params.top_p:
                break
        current[[token_id for token_id in range(len(current)) if token_id not in keep]] = -np.inf
    if row.params.min_p > 0:
        probs = softmax(current)
        ratio = probs / probs.max()
        margin = min(margin, float(np.abs(ratio - row.params.min_p).min()))
        current[ratio < row.params.min_p] = -np.inf
    return softmax(current), float(margin)


def distribution(logits: Row, row: SampleRow) -> tuple[Row, float]:
    return truncated(penalised(logits, row) / row.params.temperature, row)
