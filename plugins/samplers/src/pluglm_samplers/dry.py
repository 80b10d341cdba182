"""DRY, "don't repeat yourself" (p-e-w, text-generation-webui pull request 5677, 2024): going on with a copy costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import FLOAT32, keep_finite, require_ids

# R: rows, V: vocabulary, n: tokens of all contexts, one after another, c: places behind a copy

Ids = NDArray[np.int64]


class Dry(LogitsStep):
    """l - multiplier * base ** (run - allowed_length) for a token that would lengthen a copy of the context's end.

    run: how many tokens before an earlier occurrence of the token are those that the context ends with; the longest
    one counts, from allowed_length on. The context is prompt and output. A run holds no breaker, and breakers are not
    penalised.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_breaker_ids")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.dry_multiplier > 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        copies = find_copies(rows, logits_RV.shape[1])
        params = [row.params for row in rows]
        multiplier_R, base_R = (np.array([getattr(one, name) for one in params]) for name in self.parameters[:2])
        allowed_R = np.array([one.dry_allowed_length for one in params])
        rows_c = copies.rows_c
        excess_c = copies.runs_c - allowed_R[rows_c]
        with np.errstate(over="ignore"):
            penalty_c = np.minimum(multiplier_R[rows_c] * base_R[rows_c] ** excess_c, FLOAT32.max)
        index = (torch.from_numpy(rows_c).to(logits_RV.device), torch.from_numpy(copies.ids_c).to(logits_RV.device))
        before_c = logits_RV[index]
        changed_c = before_c - torch.from_numpy(penalty_c).to(logits_RV.device)
        return logits_RV.index_put_(index, keep_finite(changed_c, before_c).float())


class Copies(NamedTuple):
    """Tokens that would lengthen a copy, each once a row, with the longest run before them."""

    rows_c: Ids
    ids_c: Ids
    runs_c: Ids


def find_copies(rows: Sequence[SampleRow], vocab_size: int) -> Copies:
    """Runs of allowed_length or more. Those whose penalty is the largest number already are not followed further.

    All places of all rows are compared with the ends of their contexts at once, one token further back each time; a
    place that differs is out.
    """
    contexts = [np.array((*row.prompt_token_ids, *row.output_token_ids), dtype=np.int64) for row in rows]
    lengths_R = np.array([len(one) for one in contexts])
    ids_n, ends_R = np.concatenate(contexts), lengths_R.cumsum()
    require_ids(torch.from_numpy(ids_n), vocab_size)
    rows_n = np.arange(len(rows)).repeat(lengths_R)
    breakers = [_is_breaker(one, row.params) for one, row in zip(contexts, rows, strict=True)]
    limits_R = np.array([_longest(row.params, one) for row, one in zip(rows, breakers, strict=True)])
    first_n, last_n = (ends_R - lengths_R)[rows_n], ends_R[rows_n] - 1
    room_n = np.minimum(np.arange(len(ids_n)) - first_n, limits_R[rows_n])  # tokens before each place that may match
    runs_n, places, run = np.zeros_like(ids_n), np.flatnonzero(room_n > 0), 0
    while len(places):
        places = places[ids_n[places - 1 - run] == ids_n[last_n[places] - run]]
        run += 1
        runs_n[places] = run
        places = places[room_n[places] > run]
    allowed_R = np.array([row.params.dry_allowed_length for row in rows])
    found = np.flatnonzero((runs_n >= allowed_R[rows_n]) & ~np.concatenate(breakers))
    order = found[np.lexsort((runs_n[found], ids_n[found], rows_n[found]))]
    keys = rows_n[order] * vocab_size + ids_n[order]
    order = order[np.append(keys[1:] != keys[:-1], True)[: len(order)]]  # the longest run of each token
    return Copies(rows_n[order], ids_n[order], runs_n[order])


def _is_breaker(ids_n: Ids, params: SamplingParams) -> NDArray[np.bool_]:
    return np.isin(ids_n, params.dry_breaker_ids) if params.dry_breaker_ids else np.zeros(len(ids_n), dtype=np.bool_)


def _longest(params: SamplingParams, is_breaker_n: NDArray[np.bool_]) -> int:
    """The longest run that can matter: behind the last breaker, and until the penalty is the largest float32."""
    behind = len(is_breaker_n) - 1 - int(np.flatnonzero(is_breaker_n)[-1]) if is_breaker_n.any() else len(is_breaker_n)
    growth, headroom = math.log(params.dry_base), math.log(FLOAT32.max) - math.log(params.dry_multiplier)
    saturated = math.ceil(max(0.0, headroom) / growth) if growth > 0 else 0
    return min(behind, params.dry_allowed_length + saturated)
