"""Drops tokens that are much less likely than the best one (Nguyen et al., "Turning up the heat: min-p", 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import column
from pluglm_samplers.ranking import drop_below

# R: rows, V: vocabulary


class MinP(LogitsStep):
    """p_i >= min_p * max p survives, decided on logits: l_i >= l_max + ln(min_p). No softmax is needed."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("min_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        gap_R1 = column((math.log(row.params.min_p) for row in rows), logits_RV.device)
        return drop_below(logits_RV, logits_RV.amax(-1, keepdim=True) + gap_R1)
