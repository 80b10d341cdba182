"""Drops tokens below a fixed probability (Hewitt et al., "Truncation sampling as language model desmoothing", 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import column

# R: rows, V: vocabulary


class EpsilonCutoff(LogitsStep):
    """p_i >= epsilon survives, and the best token always does."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("epsilon_cutoff",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.epsilon_cutoff > 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        floor_R1 = column((row.params.epsilon_cutoff for row in rows), logits_RV.device)
        return drop_unlikely(logits_RV, logits_RV.softmax(-1), floor_R1)


def drop_unlikely(logits_RV: torch.Tensor, probs_RV: torch.Tensor, floor_R1: torch.Tensor) -> torch.Tensor:
    """Tokens with a probability below the floor, and below the best one's, go to -inf, in place; NaN stays."""
    return logits_RV.masked_fill_(probs_RV < torch.minimum(floor_R1, probs_RV.amax(-1, keepdim=True)), -torch.inf)
