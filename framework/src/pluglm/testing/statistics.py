"""The cell test: whether counts can come from exact probabilities, with a stated chance of a false alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cell_test(counts: Sequence[int], probabilities: Sequence[float], delta: float) -> str | None:
    """None, or which cell is off. A correct sampler fails with probability at most delta, for every table and size.

    Fails iff N * KL(observed || expected) > ln(2 C / delta) for one of the C cells, KL between Bernoulli laws:
    Chernoff's bound for each side of each cell, and a union bound. One hit in a zero cell fails at once.
    """
    total, limit = sum(counts), math.log(2 * len(counts) / delta)
    for cell, (count, expected) in enumerate(zip(counts, probabilities, strict=True)):
        observed = count / total
        if total * _divergence(observed, expected) > limit:
            return f"cell {cell}: {count} of {total} = {observed:.4f} where {expected:.4f} is due"
    return None


def _divergence(p: float, q: float) -> float:
    """KL divergence in nats between Bernoulli(p) and Bernoulli(q)."""
    return _term(p, q) + _term(1 - p, 1 - q)


def _term(p: float, q: float) -> float:
    if p <= 0:
        return 0.0
    return math.inf if q <= 0 else p * math.log(p / q)
