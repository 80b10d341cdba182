"""Exclude top choices (XTC, p-e-w, text-generation-webui pull request 6335, 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.verification.randomness import Coins, Purpose
from pluglm_samplers.blocks import Floats, Wide, drop_where, in_blocks, masses, on_host
from pluglm_samplers.columns import column

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


class Xtc(LogitsStep):
    """With probability xtc_probability, of the tokens with p_i >= xtc_threshold all but the least likely one go.

    Ties rank by lowest id, so of equally likely ones the highest id is the least likely. Fewer than two such tokens,
    and no effect. One coin a position, keyed by (seed, lane, position): a neighbour or a draft cannot move it. Greedy
    rows ignore it.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("xtc_probability", "xtc_threshold")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._coins = Coins()

    def is_active(self, params: SamplingParams) -> bool:
        return params.xtc_probability > 0.0 and not params.greedy

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            fires, thresholds = ([self._fires(row)] for row in rows), ([row.params.xtc_threshold] for row in rows)
            return in_blocks(_drop_on_host, logits_RV, np.array(list(fires)), np.array(list(thresholds)))
        fires_R1 = torch.tensor([[self._fires(row)] for row in rows], device=logits_RV.device)
        threshold_R1 = column((row.params.xtc_threshold for row in rows), logits_RV.device)
        is_top_RV = (logits_RV.softmax(-1) >= threshold_R1) & (logits_RV > -torch.inf)
        least_R1 = logits_RV.masked_fill(~is_top_RV, torch.inf).amin(-1, keepdim=True)
        ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        spared_R1 = ids_V.where(is_top_RV & (logits_RV == least_R1), -1).amax(-1, keepdim=True)
        return logits_RV.masked_fill_(fires_R1 & is_top_RV & (ids_V != spared_R1), -torch.inf)

    def _fires(self, row: SampleRow) -> bool:
        coin = self._coins.uniform(row.seed, row.lane, row.position, Purpose.STEP)
        return coin < row.params.xtc_probability


def _drop_on_host(logits_BC: Floats, fires_B1: NDArray[np.bool_], threshold_B1: Wide) -> None:
    if not fires_B1.any():
        return
    _, mass_BC, total_B1 = masses(logits_BC)
    is_top_BC = (mass_BC >= (threshold_B1 * total_B1).astype(np.float32)) & (logits_BC > -np.inf) & fires_B1
    least_B1 = np.where(is_top_BC, logits_BC, np.float32(np.inf)).min(-1, keepdims=True)
    is_least_BC = is_top_BC & (logits_BC == least_B1)
    spared_B = is_top_BC.shape[1] - 1 - is_least_BC[:, ::-1].argmax(-1)  # the highest id of them
    is_top_BC[np.arange(len(spared_B)), spared_B] = False
    drop_where(logits_BC, is_top_BC)
