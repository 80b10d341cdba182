"""From logits to final rows in plain float64: truncations, penalties and a grammar. Written from the definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

# V: vocabulary

Floats = npt.NDArray[np.float64]
Context = Sequence[int]
Filter = Callable[[Floats, Context], Floats]

PROMPT = (0,)
TOP_P, MIN_P = 0.8, 0.3
REPETITION, FREQUENCY, PRESENCE = 1.4, 0.4, 0.6


def softmax(logits_V: Floats) -> Floats:
    weights_V = np.exp(logits_V - logits_V.max())
    row_V: Floats = weights_V / weights_V.sum()
    return row_V


def plain(logits_V: Floats, context: Context) -> Floats:
    return logits_V


def top_p(logits_V: Floats, context: Context) -> Floats:
    """The shortest prefix of the ranking with a mass of TOP_P or more, ties by lowest id."""
    row_V = softmax(logits_V)
    kept, mass = list[int](), 0.0
    for token in sorted(range(len(row_V)), key=lambda token: (-row_V[token], token)):
        kept.append(token)
        mass += row_V[token]
        if mass >= TOP_P:
            break
    return _keep(logits_V, kept)


def min_p(logits_V: Floats, context: Context) -> Floats:
    """Tokens with at least MIN_P of the best one's probability."""
    row_V = softmax(logits_V)
    return _keep(logits_V, [token for token in range(len(row_V)) if row_V[token] >= MIN_P * row_V.max()])


def penalties(logits_V: Floats, context: Context) -> Floats:
    """Repetition over prompt and output once a token; frequency and presence over the output, which is the context."""
    result_V = logits_V.copy()
    for token in {*PROMPT, *context}:
        result_V[token] = result_V[token] / REPETITION if result_V[token] > 0 else result_V[token] * REPETITION
    for token in set(context):
        result_V[token] -= FREQUENCY * list(context).count(token) + PRESENCE
    return result_V


def grammar(logits_V: Floats, context: Context) -> Floats:
    """No token follows itself, and the last of the vocabulary comes once at most; some token is always allowed."""
    last = len(logits_V) - 1
    banned = {context[-1]} if context else set()
    banned |= {last} if last in context else set()
    return _keep(logits_V, [token for token in range(len(logits_V)) if token not in banned])


def everything(logits_V: Floats, context: Context) -> Floats:
    """In the order of a sampler: mask, penalties, truncations."""
    for one in (grammar, penalties, top_p, min_p):
        logits_V = one(logits_V, context)
    return logits_V


FILTERS: dict[str, Filter] = {one.__name__: one for one in (plain, top_p, min_p, penalties, grammar, everything)}


def _keep(logits_V: Floats, tokens: Sequence[int]) -> Floats:
    result_V = np.full_like(logits_V, -np.inf)
    result_V[list(tokens)] = logits_V[list(tokens)]
    return result_V
