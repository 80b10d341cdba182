"""Nucleus truncation (Holtzman et al., "The curious case of neural text degeneration", 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.ranking import keep_best

# R: rows, V: vocabulary, H: the most likely tokens that are looked at first

_HEAD = 1024  # nuclei are small: a full sort of the vocabulary is needed only when these do not hold the mass


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
        top_p = [row.params.top_p for row in rows]
        top_p_R1 = torch.tensor(top_p, dtype=torch.float64, device=logits_RV.device).unsqueeze(1)
        return keep_best(logits_RV, nucleus_sizes(logits_RV.softmax(-1), top_p_R1))


def nucleus_sizes(probs_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Tokens in the smallest prefix with mass >= p, int64 [R], at least 1."""
    # cumsum, never sum: torch splits the sum of a single row among threads, so its bits would depend on R.
    mass_R1 = top_p_R1 * probs_RV.cumsum(-1, dtype=torch.float64)[:, -1:]
    for head in (min(_HEAD, probs_RV.shape[1]), probs_RV.shape[1]):
        running_RH = torch.topk(probs_RV, head, dim=-1).values.cumsum(-1, dtype=torch.float64)
        short_RH = running_RH < mass_R1
        if not bool(short_RH[:, -1].any()):
            break
    return (short_RH.sum(-1) + 1).clamp_(max=probs_RV.shape[1])
