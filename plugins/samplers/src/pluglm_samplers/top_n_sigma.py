"""Drops what lies n standard deviations below the best logit (Tang et al., "Top-n sigma: not all logits are you need",
2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import Floats, Wide, drop_where, in_blocks, on_host, row_sums
from pluglm_samplers.columns import row_sum, wide_column
from pluglm_samplers.ranking import drop_below

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


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

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            return in_blocks(_drop_on_host, logits_RV, np.array([[row.params.top_n_sigma] for row in rows]))
        num_sigmas_R1 = wide_column((row.params.top_n_sigma for row in rows), logits_RV.device)
        is_masked_RV = logits_RV == -torch.inf
        best_R1 = logits_RV.amax(-1, keepdim=True).double()
        below_RV = (best_R1 - logits_RV).masked_fill_(is_masked_RV, 0.0)  # distances: no digits lost to a large mean
        num_live_R1 = row_sum(~is_masked_RV)
        mean_R1 = row_sum(below_RV) / num_live_R1
        square_RV = (below_RV - mean_R1).square_().masked_fill_(is_masked_RV, 0.0)
        sigma_R1 = (row_sum(square_RV) / num_live_R1).sqrt_()
        return drop_below(logits_RV, (best_R1 - num_sigmas_R1 * sigma_R1).float())


def _drop_on_host(logits_BC: Floats, num_sigmas_B1: Wide) -> None:
    is_live_BC = logits_BC != -np.inf
    best_B1 = logits_BC.max(-1, keepdims=True).astype(np.float64)
    below_BC = np.where(is_live_BC, best_B1 - logits_BC, 0.0)
    num_live_B1 = is_live_BC.sum(-1, keepdims=True)
    below_BC -= row_sums(below_BC) / num_live_B1
    below_BC *= below_BC
    below_BC *= is_live_BC
    floor_B1 = best_B1 - num_sigmas_B1 * np.sqrt(row_sums(below_BC) / num_live_B1)
    drop_where(logits_BC, logits_BC < floor_B1.astype(np.float32))
