"""Drops tokens below a probability that falls with the entropy (eta sampling of Hewitt et al., "Truncation sampling as
language model desmoothing", 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import Floats, Wide, in_blocks, masses, mean_below, on_host
from pluglm_samplers.columns import entropy, wide_column
from pluglm_samplers.epsilon_cutoff import drop_light, drop_unlikely

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


class EtaCutoff(LogitsStep):
    """p_i >= min(eta, sqrt(eta) * exp(-H)) survives, H the entropy in nats; the best token always does."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("eta_cutoff",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.eta_cutoff > 0.0

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            return in_blocks(_drop_on_host, logits_RV, np.array([[row.params.eta_cutoff] for row in rows]))
        eta_R1 = wide_column((row.params.eta_cutoff for row in rows), logits_RV.device)
        floor_R1 = torch.minimum(eta_R1, eta_R1.sqrt() * (-entropy(logits_RV)).exp())
        return drop_unlikely(logits_RV, logits_RV.softmax(-1), floor_R1.float())


def _drop_on_host(logits_BC: Floats, eta_B1: Wide) -> None:
    below_BC, mass_BC, total_B1 = masses(logits_BC)
    # exp(-H) is exp(mean) / total, and masses are probabilities times the total
    by_entropy_B1 = np.sqrt(eta_B1) * np.exp(mean_below(below_BC, mass_BC, total_B1))
    drop_light(logits_BC, mass_BC, np.minimum(eta_B1 * total_B1, by_entropy_B1))
