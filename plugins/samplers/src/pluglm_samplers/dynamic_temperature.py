"""Temperature that follows the entropy ("dynamic temperature" of kalomaze, as in koboldcpp and llama.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.logits_params import GREEDY_BELOW
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import Floats, Wide, in_blocks, masses, mean_below, on_host
from pluglm_samplers.columns import FLOAT32, entropy, row_sum, wide_column

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


class DynamicTemperature(LogitsStep):
    """(l - max l) / T with T = low + (high - low) * (H / ln n) ** exponent, H the entropy of n live tokens.

    It divides what earlier steps left, so a `temperature` before it counts too. T is at least 1e-5.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("dynatemp_low", "dynatemp_high", "dynatemp_exponent")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.dynatemp_high > 0.0

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            columns_R1 = (np.array([[getattr(row.params, name)] for row in rows]) for name in self.parameters)
            return in_blocks(_divide_on_host, logits_RV, *columns_R1)
        low_R1, high_R1, exponent_R1 = (
            wide_column((getattr(row.params, name) for row in rows), logits_RV.device) for name in self.parameters
        )
        most_R1 = row_sum(logits_RV > -torch.inf).log()
        share_R1 = (entropy(logits_RV) / most_R1).nan_to_num(0.0).clamp(0.0, 1.0)  # 0 / 0 for one live token
        temperature_R1 = low_R1 + (high_R1 - low_R1) * share_R1**exponent_R1
        temperature_R1 = temperature_R1.clamp_(GREEDY_BELOW, FLOAT32.max).float()
        return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)


def _divide_on_host(logits_BC: Floats, low_B1: Wide, high_B1: Wide, exponent_B1: Wide) -> None:
    below_BC, mass_BC, total_B1 = masses(logits_BC)
    most_B1 = np.log((logits_BC > -np.inf).sum(-1, keepdims=True))
    entropy_B1 = np.log(total_B1) - mean_below(below_BC, mass_BC, total_B1)
    share_B1 = np.nan_to_num(entropy_B1 / most_B1, nan=0.0, posinf=1.0).clip(0.0, 1.0)  # 0 / 0 for one live token
    temperature_B1 = low_B1 + (high_B1 - low_B1) * share_B1**exponent_B1
    np.divide(below_BC, temperature_B1.clip(GREEDY_BELOW, FLOAT32.max).astype(np.float32), out=logits_BC)
