"""Drops what lies n standard deviations below the best logit (Tang et al., "Top-n sigma: not all logits are you need",
2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import row_sum, wide_column
from pluglm_samplers.ranking import drop_below

# R: rows, V: vocabulary


class TopNSigma(LogitsStep):
    """l_i >= max l - n * sigma survives; sigma is the population deviation of the live logits, in float64.

    The kept set is the same at any temperature.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_n_sigma",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.top_n_sigma > 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        num_sigmas_R1 = wide_column((row.params.top_n_sigma for row in rows), logits_RV.device)
        is_masked_RV = logits_RV == -torch.inf
        best_R1 = logits_RV.amax(-1, keepdim=True).double()
        below_RV = (best_R1 - logits_RV).masked_fill_(is_masked_RV, 0.0)  # distances: no digits lost to a large mean
        num_live_R1 = row_sum(~is_masked_RV)
        mean_R1 = row_sum(below_RV) / num_live_R1
        square_RV = (below_RV - mean_R1).square_().masked_fill_(is_masked_RV, 0.0)
        sigma_R1 = (row_sum(square_RV) / num_live_R1).sqrt_()
        return drop_below(logits_RV, (best_R1 - num_sigmas_R1 * sigma_R1).float())
