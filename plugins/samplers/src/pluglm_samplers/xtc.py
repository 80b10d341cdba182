"""Exclude top choices (XTC, p-e-w, text-generation-webui pull request 6335, 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import column
from pluglm_samplers.randomness import Coins, Purpose

# R: rows, V: vocabulary


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

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
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
