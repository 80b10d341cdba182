"""Adds what the request says to single tokens (OpenAI API reference: bias is added to the logits before sampling)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams, keep_finite, places

# R: rows, V: vocabulary, n: biased tokens of all rows


class LogitBias(LogitsStep):
    """l + bias in float32. It is no mask: no value brings a masked token back, and none takes a token out for good."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("logit_bias",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._ids = PerParams(lambda params: torch.tensor(list(params.logit_bias), dtype=torch.int64))
        self._bias = PerParams(lambda params: torch.tensor(list(params.logit_bias.values()), dtype=torch.float64))

    def is_active(self, params: SamplingParams) -> bool:
        return any(params.logit_bias.values())

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        index = places([self._ids(row.params) for row in rows], logits_RV)
        bias_n = torch.cat([self._bias(row.params) for row in rows]).to(logits_RV.device)
        before_n = logits_RV[index]
        return logits_RV.index_put_(index, keep_finite(before_n + bias_n, before_n).float())
