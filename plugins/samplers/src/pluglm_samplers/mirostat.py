"""Mirostat (Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", ICLR 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import column
from pluglm_samplers.ranking import keep_best
from pluglm_samplers.zipf import zipf_counts

# R: rows, V: vocabulary, C: tokens that a row kept


class _Seen(NamedTuple):
    """What a lane needs of one position, once the token that came there is known."""

    mu: float
    ids_C: NDArray[np.int64]  # ascending
    bits_C: NDArray[np.float32]  # their surprise, in the row that was drawn from

    def next_mu(self, token: int, params: SamplingParams) -> float:
        """mu - eta * (surprise - tau). A token that was dropped is a draft that will be refused: mu stays."""
        place = int(self.ids_C.searchsorted(token))
        if place == len(self.ids_C) or self.ids_C[place] != token:
            return self.mu
        return self.mu - params.mirostat_eta * (float(self.bits_C[place]) - params.mirostat_tau)


class Mirostat(LogitsStep):
    """A truncation that follows the surprise of the lane's tokens. In bits, mu is 2 tau at first.

    Version 2 drops tokens with -log2 p > mu, version 1 all but the k best with a k estimated by `zipf_counts`; the best
    one always stays. Then mu goes to mu - eta * (surprise - tau), where the surprise of the token that came is measured
    after the truncation, as llama.cpp does. What earlier steps left counts as the row.

    mu is kept in `row.memory`, by position, with the surprise of every token that may come there.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("mirostat", "mirostat_tau", "mirostat_eta")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.mirostat > 0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        rounds = _rounds(rows)
        if len(rounds) == 1:
            return self._truncate(logits_RV, rows, True)
        for number, indices in enumerate(rounds):
            part_RV = self._truncate(logits_RV[indices], [rows[index] for index in indices], number == 0)
            logits_RV[indices] = part_RV
        return logits_RV

    def _truncate(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], is_first: bool) -> torch.Tensor:
        """At most one row of each lane. is_first: of its window, so nothing but the position before it is final."""
        mu = [self._mu(row, is_first) for row in rows]
        by_rank = [index for index, row in enumerate(rows) if row.params.mirostat == 1]
        by_bits_R1 = column((math.inf if row.params.mirostat == 1 else one for row, one in zip(rows, mu, strict=True)),
                            logits_RV.device)  # fmt: skip
        bits_RV = _bits(logits_RV)
        floor_R1 = torch.maximum(by_bits_R1, bits_RV.amin(-1, keepdim=True))
        logits_RV.masked_fill_(bits_RV > floor_R1, -torch.inf)
        if any(lost := [math.isnan(one) for one in mu]):  # nothing may be drawn from a guess
            logits_RV[torch.tensor(lost, device=logits_RV.device)] = -torch.inf
        if by_rank:
            best_RV = logits_RV[by_rank]
            logits_RV[by_rank] = keep_best(best_RV, zipf_counts(best_RV, np.array([mu[index] for index in by_rank])))
        self._remember(logits_RV, rows, mu)
        return logits_RV

    def _mu(self, row: SampleRow, is_first: bool) -> float:
        """Of this row. NaN when the row before was never here: it was broken, so that this one is never reached."""
        if row.memory is None or row.position == 0:
            return 2 * row.params.mirostat_tau
        seen: dict[int, _Seen] = row.memory.get(self, {})
        before = seen.get(row.position - 1)
        if before is None:
            return math.nan
        if is_first:  # what lies further back is past, and what lies behind it was refused
            row.memory[self] = {row.position - 1: before}
        return before.next_mu(row.output_token_ids[-1], row.params)

    def _remember(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], mu: Sequence[float]) -> None:
        if all(row.memory is None for row in rows):
            return
        for row, one, bits_V in zip(rows, mu, _bits(logits_RV).cpu().numpy(), strict=True):
            if row.memory is not None and not math.isnan(one):
                ids_C = np.flatnonzero(bits_V < np.inf)
                row.memory.setdefault(self, {})[row.position] = _Seen(one, ids_C, bits_V[ids_C])


def _bits(logits_RV: torch.Tensor) -> torch.Tensor:
    """Surprises in bits, float32; infinite where nothing can come."""
    return logits_RV.log_softmax(-1).mul_(-1 / math.log(2))


def _rounds(rows: Sequence[SampleRow]) -> list[list[int]]:
    """Rows by number: the first of every lane, then the second, as positions go up."""
    lanes: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        lanes.setdefault(id(row.memory) if row.memory is not None else -index - 1, []).append(index)
    if len(lanes) == len(rows):
        return [list(range(len(rows)))]
    in_order = [sorted(lane, key=lambda index: rows[index].position) for lane in lanes.values()]
    return [[index for index in some if index is not None] for some in zip_longest(*in_order)]
