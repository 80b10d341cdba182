"""Nucleus truncation (Holtzman et al., "The curious case of neural text degeneration", 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.ranking import is_best_by_row, keep_best, sort_best

# R: rows, V: vocabulary, C: the tokens that may belong to a nucleus


class TopP(LogitsStep):
    """The smallest prefix of the ranking whose mass is p or more survives (ties by lowest id); p = 0 keeps one token.

    Mass is measured on what earlier steps kept, renormalised. Probabilities are float32, their running sum float64.
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
        probs_RV, top_p = logits_RV.softmax(-1), [row.params.top_p for row in rows]
        if is_best_by_row(probs_RV):
            for row, p in enumerate(top_p):
                keep_nucleus(logits_RV[row], probs_RV[row], p)
            return logits_RV
        # cumsum, never sum: torch splits the sum of a single row among threads, so its bits would depend on R.
        total_R1 = probs_RV.cumsum(-1, dtype=torch.float64)[:, -1:]
        top_p_R1 = torch.from_numpy(np.array(top_p, dtype=np.float64)).to(logits_RV.device).unsqueeze(1)
        return keep_best(logits_RV, nucleus_sizes(probs_RV, top_p_R1 * total_R1))


def nucleus_sizes(probs_RV: torch.Tensor, mass_R1: torch.Tensor) -> torch.Tensor:
    """Tokens in the smallest prefix of the ranking with at least that mass (float64), int64 [R], at least 1."""
    running_RV = sort_best(probs_RV, probs_RV.shape[1]).cumsum(-1, dtype=torch.float64)
    return (torch.searchsorted(running_RV, mass_R1).squeeze(1) + 1).clamp_(max=probs_RV.shape[1])


def keep_nucleus(logits_V: torch.Tensor, probs_V: torch.Tensor, top_p: float) -> None:
    """keep_best of one row's nucleus, to the bit, on the host. Sorts only the tokens that may belong to it.

    Tokens with less than (1 - p) * total / 2V each have at most half of the mass that may be dropped, all together. So
    no nucleus reaches them, nor do ties with its last token.
    """
    probs, logits = probs_V.numpy(), logits_V.numpy()
    total = float(probs_V.cumsum(-1, dtype=torch.float64)[-1])
    ids_C = (probs >= (1 - top_p) * total / (2 * len(probs))).nonzero()[0]
    if not len(ids_C):
        return  # NaN, which is found by whoever draws
    running_C = np.sort(probs[ids_C])[::-1].cumsum(dtype=np.float64)
    count = min(int(running_C.searchsorted(top_p * total)) + 1, len(ids_C))
    logits_C = logits[ids_C]
    last = np.sort(logits_C)[-count]
    is_kept_C = logits_C > last
    tied = (logits_C == last).nonzero()[0]
    is_kept_C[tied[: count - np.count_nonzero(is_kept_C)]] = True
    logits.fill(-np.inf)
    logits[ids_C[is_kept_C]] = logits_C[is_kept_C]
