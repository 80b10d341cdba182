"""Temperature that follows the entropy ("dynamic temperature" of kalomaze, as in koboldcpp and llama.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.logits_params import GREEDY_BELOW
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import FLOAT32, entropy, row_sum, wide_column

# R: rows, V: vocabulary


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

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        low_R1, high_R1, exponent_R1 = (
            wide_column((getattr(row.params, name) for row in rows), logits_RV.device) for name in self.parameters
        )
        most_R1 = row_sum(logits_RV > -torch.inf).log()
        share_R1 = (entropy(logits_RV) / most_R1).nan_to_num(0.0).clamp(0.0, 1.0)  # 0 / 0 for one live token
        temperature_R1 = low_R1 + (high_R1 - low_R1) * share_R1**exponent_R1
        temperature_R1 = temperature_R1.clamp_(GREEDY_BELOW, FLOAT32.max).float()
        return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)
