"""Nucleus truncation (Holtzman et al., "The curious case of neural text degeneration", 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.ranking import SHORT, is_best_by_row, keep_best, sort_best

# R: rows, V: vocabulary, C: the tokens that may belong to a nucleus


class TopP(LogitsStep):
    """The smallest prefix of the ranking whose mass is p or more survives (ties by lowest id); p = 0 keeps one token.

    Mass is measured on what earlier steps kept. A token's is exp(l - max l) in float32, their running sum float64.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        top_p = [row.params.top_p for row in rows]
        if is_best_by_row(logits_RV):
            with np.errstate(over="ignore"):  # a token too far below the best one has no mass
                for row, p in enumerate(top_p):
                    keep_nucleus(logits_RV[row], p)
            return logits_RV
        ranked_RV = sort_best(logits_RV, logits_RV.shape[1])
        return keep_best(logits_RV, nucleus_sizes(ranked_RV, top_p), ranked_RV)


def nucleus_sizes(ranked_RV: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Tokens in the smallest prefix of the ranking with top_p of the row's mass, int64 [R], at least 1.

    ranked_RV: all logits of a row, the largest first. Of a row without mass it is 1.
    """
    if ranked_RV.device.type != "cpu":
        all_RV = (ranked_RV - ranked_RV[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
        wanted_R = all_RV[:, -1] * torch.tensor(top_p, dtype=torch.float64, device=ranked_RV.device)
        return (all_RV[:, :-1] < wanted_R.unsqueeze(1)).sum(-1) + 1
    host_RV = ranked_RV.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # far below the best one, or of a row with infinite logits
        mass_RV = np.exp(host_RV - host_RV[:, :1])
    running_RV = torch.from_numpy(mass_RV).cumsum(-1, dtype=torch.float64).numpy()  # numpy takes three times as long
    mass_R = running_RV[:, -1] * np.array(top_p)
    return torch.from_numpy((running_RV >= mass_R[:, None]).argmax(-1) + 1)


def keep_nucleus(logits_V: torch.Tensor, top_p: float) -> None:
    """The same of one row on the host; to the bit, when it is short. A row without mass stays, for whoever draws."""
    logits = logits_V.numpy()
    best = logits.max()
    if not math.isfinite(best):
        return
    if len(logits) <= SHORT:
        _keep_prefix(logits, best, top_p, None)
        return
    mass = np.exp(logits - best)
    total = float(mass.sum(dtype=np.float64))
    # Tokens with less than (1 - p) * total / 2V each have at most half of the mass that may be dropped, all together.
    # So no nucleus reaches them, nor do ties with its last token: only the others are sorted.
    ids_C = (mass >= (1 - top_p) * total / (2 * len(mass))).nonzero()[0]
    logits_C = logits[ids_C]
    _keep_prefix(logits_C, best, top_p, total)
    logits.fill(-np.inf)
    logits[ids_C] = logits_C


def _keep_prefix(logits_C: np.ndarray, best: np.float32, top_p: float, total: float | None) -> None:
    """All but the nucleus go to -inf. total: the mass that top_p is a part of; None is that of logits_C."""
    ranked_C = np.sort(logits_C)[::-1]
    running_C = np.exp(ranked_C - best).cumsum(dtype=np.float64)
    mass = top_p * (running_C[-1] if total is None else total)
    count = min(int(running_C.searchsorted(mass)) + 1, len(ranked_C))
    last = ranked_C[count - 1]
    is_dropped_C = logits_C < last
    if count < len(ranked_C) and ranked_C[count] == last:  # of the ties, the highest ids go
        tied = (logits_C == last).nonzero()[0]
        num_above = len(ranked_C) - int(ranked_C[::-1].searchsorted(last, side="right"))
        is_dropped_C[tied[count - num_above :]] = True
    logits_C[is_dropped_C] = -np.inf
