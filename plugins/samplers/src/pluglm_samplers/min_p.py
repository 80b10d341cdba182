"""Drops tokens that are much less likely than the best one (Nguyen et al., "Turning up the heat: min-p", 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import Floats, drop_where, in_blocks, on_host
from pluglm_samplers.columns import column
from pluglm_samplers.ranking import drop_below

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


class MinP(LogitsStep):
    """p_i >= min_p * max p survives, decided on logits: l_i >= l_max + ln(min_p). No softmax is needed."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("min_p",)
    limits = ("min_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        gap_R1 = column((math.log(row.params.min_p) for row in rows), logits_RV.device)
        if on_host(logits_RV):
            return in_blocks(_drop_on_host, logits_RV, gap_R1.numpy())
        return drop_below(logits_RV, logits_RV.amax(-1, keepdim=True) + gap_R1)


def _drop_on_host(logits_BC: Floats, gap_B1: Floats) -> None:
    drop_where(logits_BC, logits_BC < logits_BC.max(-1, keepdims=True) + gap_B1)
