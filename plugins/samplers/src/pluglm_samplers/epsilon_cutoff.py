"""Drops tokens below a fixed probability (Hewitt et al., "Truncation sampling as language model desmoothing", 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import Floats, Wide, drop_where, in_blocks, masses, on_host
from pluglm_samplers.columns import column

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


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

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            return in_blocks(_drop_on_host, logits_RV, np.array([[row.params.epsilon_cutoff] for row in rows]))
        floor_R1 = column((row.params.epsilon_cutoff for row in rows), logits_RV.device)
        return drop_unlikely(logits_RV, logits_RV.softmax(-1), floor_R1)


def drop_unlikely(logits_RV: torch.Tensor, probs_RV: torch.Tensor, floor_R1: torch.Tensor) -> torch.Tensor:
    """Tokens with a probability below the floor, and below the best one's, go to -inf, in place; NaN stays."""
    return logits_RV.masked_fill_(probs_RV < torch.minimum(floor_R1, probs_RV.amax(-1, keepdim=True)), -torch.inf)


def _drop_on_host(logits_BC: Floats, floor_B1: Wide) -> None:
    _, mass_BC, total_B1 = masses(logits_BC)
    drop_light(logits_BC, mass_BC, floor_B1 * total_B1)


def drop_light(logits_BC: Floats, mass_BC: Floats, floor_B1: Wide) -> None:
    """`drop_unlikely` by masses, of which the best token's is 1."""
    drop_where(logits_BC, mass_BC < np.minimum(floor_B1, 1.0).astype(np.float32))
