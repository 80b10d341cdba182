"""Divides logits by the temperature. Greedy rows never come here: their argmax is the sampler's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import column

# R: rows, V: vocabulary


class Temperature(LogitsStep):
    """(l - max l) / T in float32. The maximum goes first, so the smallest temperature cannot overflow to +inf."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("temperature",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.temperature != 1.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        temperature_R1 = column((row.params.temperature for row in rows), logits_RV.device)
        return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)
